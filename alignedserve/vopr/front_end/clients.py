"""Clients of the gateways, which know what each answer has to be: some chat, some have batch jobs.

A client whose call fails for a reason that is not its own tries again, at another gateway perhaps, until it has its
answer. Whatever it gets, complete or not, must be the beginning of the answer that the request would have had alone.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from alignedserve.protocol.sse import EventReader
from alignedserve.vopr.front_end.http_call import JSON, Answer, Broken, HttpCall
from alignedserve.vopr.front_end.virtual_gateway import VirtualGateway
from alignedserve.vopr.front_end.words import NAME, Question

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# The seconds until a client tries again, and looks again for the end of its job.
RETRY_S, LOOK_S = 1.0, 2.0
# A client that has got nothing new for so many seconds leaves. That is longer than anything may take: a client that
# asked again sooner would hide that its request was forgotten.
PATIENCE_S = 3600.0
_BOUNDARY = "boundary"
_FORM = f"multipart/form-data; boundary={_BOUNDARY}"


class Wrong(RuntimeError):
    """A client got what it must never get."""


@dataclass
class Clients:
    gateways: Sequence[VirtualGateway]
    random: Random
    record: Callable[..., None]
    # What came of calls: "answered", "left", "broken", a status, ...
    outcomes: Counter[str] = field(default_factory=Counter)
    num_waiting: int = 0

    # ---- chats ----

    async def chat(self, number: int, question: Question, leaves_after: int | None = None) -> None:
        """Asks until it is answered, or leaves for good after so many events of the stream."""
        self.num_waiting += 1
        while not await self._try_chat(question, leaves_after):
            await asyncio.sleep(RETRY_S)
        self.num_waiting -= 1
        self.record("chat", number, "is over")

    async def _try_chat(self, question: Question, leaves_after: int | None) -> bool:
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": question.prompt}],
            "seed": question.seed,
            "stream": True,
        }
        call = self._call("POST", CHATS, json.dumps(body).encode())
        if call is None:
            return False
        stream = _Stream(question)
        try:
            async with asyncio.timeout(PATIENCE_S) as patience:
                async for piece in call.pieces():
                    if call.status != 200:
                        continue
                    stream.feed(piece)
                    if leaves_after is not None and stream.num_events >= leaves_after:
                        return self._count("left")
                    if self.random.random() < 0.02:
                        await asyncio.sleep(self.random.expovariate(0.5))
                    patience.reschedule(asyncio.get_running_loop().time() + PATIENCE_S)
        except (Broken, TimeoutError) as error:
            return not self._count(type(error).__name__)
        finally:
            call.leave()
        if call.status != 200:
            return not self._count(str(call.status))
        is_whole = stream.close()
        return self._count("answered" if is_whole else "error") and is_whole

    # ---- batch jobs ----

    async def batch(self, number: int, questions: Sequence[Question]) -> None:
        """Uploads a file, waits for the end of its job, checks each line, and deletes the files."""
        self.num_waiting += 1
        lines = [json.dumps(_line(index, each)).encode() + b"\n" for index, each in enumerate(questions)]
        file = await self._ask("POST", "/v1/files", _form(b"".join(lines)), _FORM)
        asked = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        job = await self._ask("POST", "/v1/batches", json.dumps(asked).encode())
        while job["status"] in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(LOOK_S)
            job = await self._ask("GET", f"/v1/batches/{job['id']}")
        if job["status"] != "completed":
            raise Wrong(f"job {number} is {job['status']}: {job}")
        await self._check_results(job, questions)
        for name in ("input_file_id", "output_file_id", "error_file_id"):
            if job[name]:
                await self._ask("DELETE", f"/v1/files/{job[name]}", is_deleted=True)
        self.num_waiting -= 1
        self.record("batch", number, "is over")

    async def _check_results(self, job: Any, questions: Sequence[Question]) -> None:
        found: Counter[str] = Counter()
        for name in ("output_file_id", "error_file_id"):
            text = await self._ask_raw("GET", f"/v1/files/{job[name]}/content") if job[name] else None
            for result in map(json.loads, text.body.splitlines() if text else ()):
                found[result["custom_id"]] += 1
                self._check_result(result, questions[int(result["custom_id"])])
        if found != Counter(str(index) for index in range(len(questions))):
            raise Wrong(f"job {job['id']} has these lines, and how often: {found}")

    def _check_result(self, result: Any, question: Question) -> None:
        if result["error"]:
            # The line was running each time that a gateway died.
            if result["error"]["code"] != "line_failed":
                raise Wrong(f"a line is answered with {result['error']}")
            self._count("line_failed")
            return
        choice = result["response"]["body"]["choices"][0]
        if (choice["text"], choice["finish_reason"]) != question.answer:
            raise Wrong(f"a line is answered with {choice}, must be {question.answer}")
        self._count("line")

    # ---- calls ----

    async def _ask(
        self, method: str, path: str, body: bytes = b"", kind: str = JSON, is_deleted: bool = False
    ) -> Any:
        answer = await self._ask_raw(method, path, body, kind, is_deleted)
        return json.loads(answer.body)

    async def _ask_raw(
        self, method: str, path: str, body: bytes = b"", kind: str = JSON, is_deleted: bool = False
    ) -> Answer:
        """Asks until the answer is a success. Where a file `is_deleted`, an earlier try may have done that; and the
        file may be in use, by a job that an earlier try has made without an answer."""
        gone, in_use = (404, 400) if is_deleted else (None, None)
        while True:
            if call := self._call(method, path, body, kind):
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        answer = await call.whole()
                except (Broken, TimeoutError) as error:
                    self._count(type(error).__name__)
                else:
                    if answer.status in (200, gone):
                        return answer
                    if answer.status < 500 and answer.status not in (429, in_use):
                        raise Wrong(f"{method} {path} is answered with {answer}")
                    self._count(str(answer.status))
            await asyncio.sleep(RETRY_S)

    def _call(self, method: str, path: str, body: bytes = b"", kind: str = JSON) -> HttpCall | None:
        return self.random.choice(self.gateways).call(method, path, body, kind)

    def _count(self, outcome: str) -> bool:
        self.outcomes[outcome] += 1
        self.record("call", outcome)
        return True


class _Stream:
    """A stream of events, which has to be the beginning of the answer, and ends once."""

    def __init__(self, question: Question) -> None:
        self.num_events = 0
        self._text, self._reason = question.answer
        self._events = EventReader()
        self._so_far = ""
        self._ends: list[str] = []
        self._error: Any = None

    def feed(self, data: bytes) -> None:
        for event in self._events.feed(data):
            self.num_events += 1
            if "[DONE]" in self._ends:
                raise Wrong(f"after its end a stream goes on with {event!r}")
            self._take(event)

    def close(self) -> bool:
        """Called when the answer is complete. Returns whether it is whole: it may have ended with an error."""
        if self._ends[-1:] != ["[DONE]"]:
            raise Wrong(f"a stream ends without [DONE]: {self._ends}")
        if self._error:
            return False
        if self._so_far != self._text or self._ends != [self._reason, "[DONE]"]:
            raise Wrong(
                f"a stream says {self._so_far!r}, {self._ends}; must be {self._text!r}, {self._reason}"
            )
        return True

    def _take(self, event: bytes) -> None:
        if event == b"[DONE]":
            self._ends.append("[DONE]")
            return
        body = json.loads(event)
        if "error" in body:
            self._error = body["error"]
            return
        choice = body["choices"][0]
        self._so_far += choice["delta"].get("content", "")
        if not self._text.startswith(self._so_far):
            raise Wrong(f"a stream says {self._so_far!r}, must be {self._text!r}")
        if choice["finish_reason"]:
            self._ends.append(choice["finish_reason"])


def _line(index: int, question: Question) -> dict[str, Any]:
    body = {
        "model": NAME,
        "prompt": question.prompt,
        "seed": question.seed,
        "max_tokens": question.max_tokens,
    }
    return {"custom_id": str(index), "method": "POST", "url": COMPLETIONS, "body": body}


def _form(content: bytes) -> bytes:
    head = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    file = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    return head.encode() + file.encode() + content + f"\r\n--{_BOUNDARY}--\r\n".encode()
