"""Prepares bodies in child processes. A chat template or tokenizer may take arbitrarily long, and a client may exploit
that.

Each size class has its own process. So a short chat does not wait behind a document, and a chat with a document does
not wait behind the largest bodies. A small body that takes too long is tried again as a medium one. A spare process is
ready for the size class that needs one next: because its process has ended, or because it had none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from alignedserve.gateway.generation.call import Call
from alignedserve.gateway.generation.endpoint import (
    ConversationNeeded,
    DirectAnswer,
    Endpoint,
    Expands,
    Result,
)
from alignedserve.gateway.generation.prepare_process import (
    MAX_MEMORY_BYTES,
    NICENESS,
    OUT_OF_MEMORY,
    ModelDescription,
    PrepareReply,
    PrepareRequest,
    TokenizerParts,
)
from alignedserve.gateway.http.errors import ApiError, unavailable
from alignedserve.gateway.http.json_pieces import Piece
from alignedserve.gateway.http.reading import too_large
from alignedserve.gateway.limits.fair_queue import FairQueue, QueueTimeout
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.process.child import Child, ChildEnded, NotStarted, Starter
from alignedserve.protocol.rate_limited_log import RateLimitedLog

_log = RateLimitedLog(logging.getLogger(__name__))

# 8 KiB of text are tokenised in 16 ms on a 2.5 GHz core. The slowest known body of this size takes 25 ms: strict
# functions with more than a hundred arguments that refer to one definition with hundreds of alternatives.
SMALL_BYTES = 8 << 10
# CPU seconds that a body may take as a small one.
SMALL_CPU_S = 0.25
# A document of this size is tokenised in 0.3 s on a 2.5 GHz core.
MEDIUM_BYTES = 256 << 10
# Seconds for a body. The largest one that is allowed by default, 8 MB of text, takes 6 s.
TIMEOUT_S = 20.0
# CPU seconds in which a process must be ready for bodies. It loads the vocabulary, which takes up to 2 s, and tries the
# chat template.
START_S = 30.0
# Wall-clock seconds for the same: other processes may have the cores.
START_CLOCK_S = 10 * START_S
# Seconds that a body waits for its turn. The client is then asked to retry.
TURN_S = 30.0


@dataclass(frozen=True)
class ReceivedBody:
    """The body of a call, and what belongs to it."""

    endpoint: Endpoint
    pieces: Sequence[bytes]
    # The owner of the call's API key (http/keys.py).
    owner: str
    # What it continues and refers to, as JSON in pieces.
    earlier: Sequence[Piece] | None = None
    is_best_effort: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.pieces)) + self.num_earlier_bytes

    @property
    def num_earlier_bytes(self) -> int:
        return sum(map(len, self.earlier or ()))


class TookTooLong(Exception):
    """A body took longer than its lane allows."""


class PrepareLane:
    """A child process that prepares one body after another, in fair turns."""

    def __init__(self, starter: Starter, adapters: dict[str, str], cpu_s: float | None = None) -> None:
        """`adapters` are those of the model, which may change. `cpu_s` is the CPU seconds that a body may take. None:
        only TIMEOUT_S limits it."""
        self._adapters = adapters
        self.child = Child(starter, 2 * TIMEOUT_S)
        self._turns = FairQueue()
        self._cpu_s = cpu_s

    async def told(self, body: ReceivedBody, room: int) -> bytes:
        """Returns the process's answer. `room`: see Beside. Raises ApiError and TookTooLong."""
        num_earlier_bytes = None if body.earlier is None else body.num_earlier_bytes
        niceness = NICENESS if self._cpu_s is None else 0
        asked = PrepareRequest(
            body.endpoint.path, TIMEOUT_S, niceness, self._cpu_s, num_earlier_bytes, room, self._adapters
        )
        try:
            async with contextlib.AsyncExitStack() as turn:
                await turn.enter_async_context(self._turns.turn(body.owner, TURN_S, body.is_best_effort))
                pieces = (asked.head, *(body.earlier or ()), *body.pieces)
                # The process works on it even if the client hangs up, so its owner keeps the turn and pays for it.
                return await asyncio.shield(asyncio.create_task(self._asked(turn.pop_all(), pieces)))
        except QueueTimeout:
            raise unavailable("bodies of other API keys are being read") from None
        except NotStarted as error:
            _log.warning(f"bodies can't be prepared: {error.error or error}")
            raise unavailable("no process can read bodies at the moment") from None
        except ChildEnded:
            raise ApiError(400, "the body takes too much memory to read") from None

    async def _asked(self, turn: contextlib.AsyncExitStack, pieces: Sequence[Piece]) -> bytes:
        """Asks the process, and ends the turn."""
        async with turn:
            try:
                return await self.child.ask(*pieces)
            except ChildEnded as ended:
                if not ended.is_timed_out or isinstance(ended, NotStarted):
                    raise
            # The next process is taken or started in the same turn, since this owner made it necessary.
            await self.child.prepare()
            raise TookTooLong


class Preparer:
    def __init__(self, model: ServedModel, limits: CallLimits, module: str, is_strict: bool = False) -> None:
        """`module` is the child process's module, with all endpoints (gateway/endpoints.py). With `is_strict`,
        unknown parameters are refused."""
        self.model = model
        self.limits = limits
        self.is_strict = is_strict
        starter = Starter(module, lambda: (self._greeting,), START_CLOCK_S, keeps_spare=True)
        self._small = PrepareLane(starter, model.adapters, SMALL_CPU_S)
        self._medium, self._large = (PrepareLane(starter, model.adapters) for _ in range(2))

    async def start(self) -> None:
        """Starts the process for small bodies, which tries the model's tokenizer and templates. A spare process then
        starts in the background.

        Raises ValueError if tokenizer or templates take too much time or memory even for a few words, and OSError if
        the machine can't start a process."""
        try:
            await self._small.child.prepare()
        except NotStarted as ended:
            if ended.error is not None:
                raise ended.error from None
            if ended.is_hung:
                raise TimeoutError(
                    f"the process that reads bodies is not ready after {START_CLOCK_S:g} s: the machine is too busy"
                ) from None
            if ended.is_timed_out:
                reason = f"takes more than {START_S:g} s"
            elif ended.status in (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGKILL):
                reason = f"takes more than {MAX_MEMORY_BYTES >> 30} GiB of memory"
            else:
                reason = f"ends its process with status {ended.status}"
            raise ValueError(
                f"{self.model.name}: its tokenizer or chat template {reason} for chats of a few words"
            ) from None

    async def call(
        self,
        endpoint: Endpoint,
        body: Sequence[bytes],
        owner: str,
        earlier: Sequence[Piece] | None = None,
    ) -> Call[Any]:
        """Returns a call. `body` is in pieces, as is `earlier`, what it continues and refers to as JSON.
        Owners of API keys (http/keys.py) take turns. Raises ApiError, which may be ConversationNeeded."""
        found = await self.result(endpoint, body, owner, earlier)
        assert isinstance(found, Call)
        return found

    async def answer(self, endpoint: Endpoint, body: Sequence[bytes], owner: str) -> DirectAnswer:
        """Returns the answer of an endpoint that needs no engine. Raises ApiError."""
        found = await self.result(endpoint, body, owner)
        assert isinstance(found, DirectAnswer)
        return found

    async def aclose(self) -> None:
        await asyncio.gather(*(lane.child.aclose() for lane in (self._small, self._medium, self._large)))

    async def result(
        self,
        endpoint: Endpoint,
        body: Sequence[bytes],
        owner: str,
        earlier: Sequence[Piece] | None = None,
        is_best_effort: bool = False,
    ) -> Result:
        """Returns the result of `endpoint.make`. Best effort waits for other bodies, except for a small share of the
        time. Raises ApiError."""
        received = ReceivedBody(endpoint, body, owner, earlier, is_best_effort)
        try:
            return await self.made(received)
        except Expands as found:
            num_added = found.num_bytes
        if received.num_bytes + num_added > self.limits.max_body_bytes:
            raise too_large(self.limits.max_body_bytes, "with all that it refers to, ")
        return await self.made(received, num_added)

    async def made(self, body: ReceivedBody, num_added: int = 0) -> Result:
        """Prepares the call in the lane for its size, including `num_added` bytes to which it refers. Raises ApiError,
        and Expands if it refers to more."""
        size = body.num_bytes + num_added
        if size <= SMALL_BYTES:
            with contextlib.suppress(TookTooLong):
                answer = await self._small.told(body, SMALL_BYTES - body.num_bytes)
                return _result_of(answer, body.endpoint)
        lane, most = (self._medium, MEDIUM_BYTES) if size <= MEDIUM_BYTES else (self._large, sys.maxsize)
        # The brackets around a conversation do not count towards the limit.
        room = max(0, min(most, self.limits.max_body_bytes) - body.num_bytes)
        try:
            return _result_of(await lane.told(body, room), body.endpoint)
        except TookTooLong:
            raise ApiError(400, f"reading the body takes longer than {TIMEOUT_S:g} s") from None

    @cached_property
    def _greeting(self) -> bytes:
        """The encoded description, cached: encoding a large vocabulary takes a second, in which no stream would
        continue."""
        model = self.model
        parts = None
        if model.tokenizer:
            files = model.tokenizer.files
            parts = TokenizerParts(files.backend.to_str(), files.special_tokens, files.chat_templates)
        description = ModelDescription(
            model.name,
            model.max_model_len,
            model.vocabulary.size,
            sorted(model.vocabulary.eos_token_ids),
            parts,
            model.parses_special_tokens,
            model.embedding_size,
            self.limits,
            self.is_strict,
            START_S,
        )
        return msgspec.msgpack.encode(description)


def _result_of(answer: bytes, endpoint: Endpoint) -> Result:
    """Raises ApiError and Expands."""
    told = msgspec.msgpack.decode(answer, type=PrepareReply)
    if told.error:
        status, message, param, code = told.error
        raise ApiError(status, message, param, code)
    if told.needed is not None:
        raise ConversationNeeded(told.needed)
    if told.num_added_bytes is not None:
        raise Expands(told.num_added_bytes)
    if told.made is None:
        raise RuntimeError(f"a body could not be prepared: {told.failure}")
    made: Result = msgspec.msgpack.decode(told.made, type=endpoint.made)
    return made
