"""Builds OpenAI's response object, whole or as a sequence of events."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

from alignedserve.gateway.generation.call import CallContext, ChoiceDelta, ResponseBuilder, TokenUsage
from alignedserve.gateway.generation.chat import TextSpec
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_pieces import Json, Piece, encode
from alignedserve.gateway.openai.responses.items import new_stem
from alignedserve.gateway.openai.responses.output import Output, run
from alignedserve.gateway.openai.responses.written import Event, WrittenText, event_pieces, response_pieces
from alignedserve.gateway.openai.token_logprobs import chat_logprobs
from alignedserve.gateway.tools.readers import Read

_ID_PREFIX = "resp_"


def new_response_id() -> str:
    return _ID_PREFIX + new_stem()


class ResponseSpec(TextSpec, frozen=True, kw_only=True):
    response_id: str = msgspec.field(default_factory=new_response_id)
    # The fields of the call that the response repeats, as a JSON object.
    repeated: bytes = b"{}"
    # The items of the call's input, as JSON with commas between them.
    input_items: bytes = b""
    # A line per item: its end in `input_items`, and its id as JSON.
    item_index: bytes = b""
    is_stored: bool = True
    is_background: bool = False
    previous_response_id: str | None = None
    conversation_id: str | None = None
    # The number of top tokens with each token. None: no log-probabilities.
    num_logprobs: int | None = None

    def builder(self, answering: CallContext) -> ResponsesBuilder:
        return ResponsesBuilder(answering, self)


@dataclass
class ResponsesBuilder(ResponseBuilder):
    answering: CallContext
    spec: ResponseSpec
    output: Output = field(init=False)
    _number: int = 0
    _num_reasoning_tokens: int = 0
    _finish_reason: str | None = None
    # Stored once, because the response that is kept and the one that is sent have to be equal.
    _completed_at: int | None = None

    def __post_init__(self) -> None:
        self.id, self.is_stored = self.spec.response_id, self.spec.is_stored
        self._reader = self.spec.reading.new_reader()
        self.output = Output(self.id.removeprefix(_ID_PREFIX))

    # ---- whole ----

    def add(self, delta: ChoiceDelta) -> None:
        run(self._events(delta))

    def whole(self, usage: TokenUsage) -> Iterator[Piece]:
        yield from self._pieces(self.finished(usage))

    def finished(self, usage: TokenUsage) -> Json:
        """Returns the final state of the response, after all deltas were added."""
        is_cut = self._finish_reason == "length"
        found = self.state("incomplete" if is_cut else "completed")
        found["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        return found | {"completed_at": self._completed_at, "usage": self._usage(usage)}

    # ---- as events ----

    def opening(self, delta: ChoiceDelta, usage: TokenUsage) -> Iterable[Piece] | None:
        if self._number:
            return None
        response = self._response(self.state("in_progress"))
        names = ("response.created", "response.in_progress")
        return [piece for name in names for piece in self._written((name, {"response": response}))]

    def events(self, delta: ChoiceDelta, usage: TokenUsage) -> Iterable[Piece]:
        for event in self._events(delta):
            yield from self._written(event)

    def end(self, usage: TokenUsage) -> Iterable[Piece]:
        state = self.finished(usage)
        yield from self._written((f"response.{state['status']}", {"response": self._response(state)}))

    def failure(self, error: ApiError) -> Iterable[Piece]:
        run(self.output.end("incomplete"))
        state = self.state("failed") | {"error": {"code": "server_error", "message": error.message}}
        yield from self._written(("response.failed", {"response": self._response(state)}))

    # ---- both ----

    def state(self, status: str) -> Json:
        """Returns the response as it is now, without its output and without the fields that it repeats."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.answering.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.answering.model.name,
            "service_tier": self.answering.tier,
            "store": self.is_stored,
            "usage": None,
        }

    def _pieces(self, state: Json) -> Iterator[Piece]:
        pieces = response_pieces(encode(state), self.output.items, memoryview(self.spec.repeated)[1:])
        # No piece is in the store.
        return cast(Iterator[Piece], pieces)

    def _response(self, state: Json) -> WrittenText:
        return WrittenText([*self._pieces(state)])

    def _events(self, delta: ChoiceDelta) -> Iterator[Event]:
        """Yields the events of a delta. Must be iterated to its end."""
        logprobs, steps, read = self._logprobs(delta), [*delta.steps()], Read()
        for number, (text, num_tokens) in enumerate(steps, 1):
            was_thinking, is_last = self._reader.is_thinking, number == len(steps)
            read.add(self._reader.feed(text))
            if self._reader.is_thinking:
                self._num_reasoning_tokens += num_tokens
            if is_last and delta.finish_reason is not None:
                self._finish_reason, self._completed_at = delta.finish_reason, int(time.time())
                read.add(self._reader.end(is_cut=delta.is_cut))
            if self.spec.num_logprobs is None and not is_last:
                # Without log-probabilities, one event for all steps is cheaper.
                continue
            is_thought = bool(read.reasoning or was_thinking or self._reader.is_thinking)
            if not self.spec.shows_reasoning:
                read.drop_thoughts()
            yield from self.output.add(read, logprobs[:num_tokens], is_thought)
            logprobs, read = logprobs[num_tokens:], Read()
        if delta.finish_reason is not None:
            yield from self.output.finish("incomplete" if delta.finish_reason == "length" else "completed")

    def _written(self, event: Event) -> Iterator[Piece]:
        number, self._number = self._number, self._number + 1
        return cast(Iterator[Piece], event_pieces(event, number))

    def _usage(self, usage: TokenUsage) -> Json:
        num_input, num_output = usage.num_prompt_tokens, usage.num_completion_tokens
        return {
            "input_tokens": num_input,
            # Clients that validate responses need the second field. Nothing is charged for a cached prefix here.
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": num_input + num_output,
        }

    def _logprobs(self, delta: ChoiceDelta) -> Sequence[Json]:
        if self.spec.num_logprobs is None:
            return ()
        model = self.answering.model
        return chat_logprobs(delta.token_ids, delta.logprobs, model, model.token_text)
