"""A chat with a server: it keeps the messages and streams the answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx2

from alignedserve.cli.http import away, refusal
from alignedserve.protocol.sse import EventReader

Json = dict[str, Any]

# The end of an answer that the user stopped. The model sees it as well.
STOPPED = "[stopped]"


class NoAnswer(Exception):
    """There is no answer, or only a part of one. The message is for the user."""


@dataclass
class ChatAnswer:
    text: str = ""
    # Reported by the server at the end; 0 until then.
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    # Seconds until the first and the last piece of text arrived.
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def stats(self) -> str:
        parts = [f"first token after {self.first_s:.3f} s", f"{self.num_prompt_tokens} prompt tokens"]
        if self.num_cached_tokens:
            parts[-1] += f" ({self.num_cached_tokens} cached)"
        rate = self.num_tokens / self.last_s if self.last_s else 0.0
        parts.append(f"{self.num_tokens} tokens in {self.last_s:.3f} s ({rate:.1f} tokens/s)")
        return ", ".join(parts)


class ChatClient:
    def __init__(self, http: httpx2.Client, model: str, options: Json) -> None:
        """`options` are the parameters of each request besides its messages."""
        self.model = model
        self._http = http
        self._options = options

    def answer(self, messages: list[Json], answer: ChatAnswer) -> Generator[str, None, None]:
        """Yields the answer's pieces and fills `answer`. Closing the generator ends the request. Raises NoAnswer."""
        asked = {"model": self.model, "messages": messages, "stream": True, **self._options}
        asked["stream_options"] = {"include_usage": True}
        begun_s = time.perf_counter()
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=asked) as response:
                if response.is_error:
                    response.read()
                    raise NoAnswer(refusal(response))
                for event in _events(response):
                    for text in _take(event, answer):
                        answer.last_s = time.perf_counter() - begun_s
                        answer.first_s = answer.first_s or answer.last_s
                        answer.text += text
                        yield text
        except httpx2.TransportError as error:
            raise NoAnswer(away(self._http, error)) from None


class ChatSession:
    def __init__(self, client: ChatClient, system_prompt: str | None) -> None:
        self.system_prompt = system_prompt
        self._client = client
        self._turns: list[Json] = []

    def ask(self, text: str, show: Callable[[str], object]) -> ChatAnswer:
        """Sends a question and adds it, with its answer, to the messages.

        If it raises NoAnswer, the question is not kept. After a KeyboardInterrupt, the partial answer is kept.
        """
        question = {"role": "user", "content": text}
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        answer = ChatAnswer()
        pieces = self._client.answer([*system, *self._turns, question], answer)
        try:
            for piece in pieces:
                show(piece)
        except KeyboardInterrupt:
            if answer.text:
                self._keep(question, f"{answer.text} {STOPPED}")
            raise
        finally:
            pieces.close()
        self._keep(question, answer.text)
        return answer

    def clear(self) -> None:
        self._turns.clear()

    def _keep(self, question: Json, text: str) -> None:
        self._turns += [question, {"role": "assistant", "content": text}]


def find_model(http: httpx2.Client, name: str | None) -> str:
    """Returns the named model or, without a name, the server's first one. Raises NoAnswer if there is none."""
    path = "/v1/models" if name is None else f"/v1/models/{quote(name)}"
    try:
        response = http.get(path)
    except httpx2.TransportError as error:
        raise NoAnswer(away(http, error)) from None
    if response.is_error:
        raise NoAnswer(refusal(response))
    try:
        return str((response.json() if name else response.json()["data"][0])["id"])
    except (ValueError, LookupError, TypeError):
        raise NoAnswer(f"{response.url}: lists no models; is it an OpenAI-compatible server?") from None


def _events(response: httpx2.Response) -> Iterator[Json]:
    """Yields the events. Raises NoAnswer if they end before the answer is complete."""
    reader = EventReader()
    for data in response.iter_bytes():
        for event in reader.feed(data):
            if event == b"[DONE]":
                return
            yield _decoded(event)
    raise NoAnswer(f"{response.url}: the answer broke off")


def _decoded(event: bytes) -> Json:
    try:
        found = json.loads(event)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise NoAnswer(f"the server sent {event[:80]!r}, which is not a chat event")
    if error := found.get("error"):
        raise NoAnswer(str(error.get("message", error) if isinstance(error, dict) else error))
    return found


def _take(event: Json, answer: ChatAnswer) -> Iterator[str]:
    if usage := event.get("usage"):
        answer.num_prompt_tokens = usage.get("prompt_tokens", 0)
        answer.num_tokens = usage.get("completion_tokens", 0)
        answer.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in event.get("choices", []):
        if text := choice.get("delta", {}).get("content"):
            yield text
