"""OpenAI's response object, complete or as its sequence of events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from alignedserve.gateway.generation.generation import Delta, Usage
from alignedserve.gateway.generation.prepared import Answering
from alignedserve.gateway.generation.response_builder import ResponseBuilder
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_pieces import Json, Piece, encode, event_named
from alignedserve.gateway.openai.responses.output import Event, Output, run
from alignedserve.gateway.openai.token_logprobs import chat_logprobs
from alignedserve.gateway.tools.readers import Reader


def new_response_id() -> str:
    return f"resp_{secrets.token_hex(24)}"


@dataclass
class ResponsesBuilder(ResponseBuilder):
    answering: Answering
    # What the response repeats of its call.
    repeated: Json
    new_reader: Callable[[], Reader]
    # The number of likeliest tokens that are shown with each token; None: no log-probabilities.
    num_logprobs: int | None = None
    shows_reasoning: bool = True
    id: str = field(default_factory=new_response_id)
    _output: Output = field(default_factory=Output)
    _number: int = 0
    _num_reasoning_tokens: int = 0
    _finish_reason: str | None = None
    # It is asked for twice, for what is kept and for what is sent, which have to be the same.
    _completed_at: int | None = None

    def __post_init__(self) -> None:
        self._reader = self.new_reader()

    # ---- whole ----

    def add(self, delta: Delta) -> None:
        run(self._events(delta))

    def whole(self, usage: Usage) -> Iterator[Piece]:
        yield encode(self.finished(usage))

    def finished(self, usage: Usage) -> Json:
        """Returns the response, after everything has been added."""
        is_cut = self._finish_reason == "length"
        found = self.body("incomplete" if is_cut else "completed")
        found["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        return found | {"completed_at": self._completed_at, "usage": self._usage(usage)}

    # ---- as events ----

    def opening(self, delta: Delta, usage: Usage) -> Iterable[Piece] | None:
        if self._number:
            return None
        body = self.body("in_progress")
        names = ("response.created", "response.in_progress")
        return [self._written((name, {"response": body})) for name in names]

    def events(self, delta: Delta, usage: Usage) -> bytes:
        return b"".join(map(self._written, self._events(delta)))

    def end(self, usage: Usage) -> Iterable[Piece]:
        found = self.finished(usage)
        yield self._written((f"response.{found['status']}", {"response": found}))

    def failure(self, error: ApiError) -> bytes:
        run(self._output.end("incomplete"))
        found = self.body("failed") | {"error": {"code": "server_error", "message": error.message}}
        return self._written(("response.failed", {"response": found}))

    # ---- both ----

    def body(self, status: str) -> Json:
        """Returns the response as it is now."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.answering.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.answering.model.name,
            "output": list(self._output.items),
            "service_tier": self.answering.service.name,
            "usage": None,
            **self.repeated,
        }

    def _events(self, delta: Delta) -> Iterator[Event]:
        """Must be iterated to its end."""
        read = self._reader.feed(delta.text)
        if self._reader.is_thinking:
            self._num_reasoning_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._finish_reason, self._completed_at = delta.finish_reason, int(time.time())
            read.add(self._reader.end(is_cut=delta.is_cut))
        if not self.shows_reasoning:
            read.reasoning = ""
        yield from self._output.add(read, self._logprobs(delta))
        if delta.finish_reason is not None:
            yield from self._output.end("incomplete" if delta.finish_reason == "length" else "completed")

    def _written(self, event: Event) -> bytes:
        name, fields = event
        body = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return event_named(name, body)

    def _usage(self, usage: Usage) -> Json:
        num_input, num_output = usage.num_prompt_tokens, usage.num_completion_tokens
        return {
            "input_tokens": num_input,
            # clients that check what they read need the second; a prefix that is kept costs nothing here
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": num_input + num_output,
        }

    def _logprobs(self, delta: Delta) -> Sequence[Json]:
        if self.num_logprobs is None:
            return ()
        return chat_logprobs(delta.token_ids, delta.logprobs, self.answering.model)
