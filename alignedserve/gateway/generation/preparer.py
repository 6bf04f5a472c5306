"""Where bodies are prepared: small ones on the event loop, which they hold up for less than a switch of threads would;
larger ones in child processes. Each size class has a process of its own, so that a chat with a long document does not
wait behind the largest bodies that there may be."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from functools import cached_property

import msgspec

from alignedserve.gateway.fair_queue import FairQueue, QueueTimeout
from alignedserve.gateway.generation.endpoint import (
    Beside,
    ConversationNeeded,
    Endpoint,
    Expands,
    Result,
)
from alignedserve.gateway.generation.prepare_process import Asked, Greeting, TokenizerParts, Told
from alignedserve.gateway.generation.prepared import Answered, Prepared
from alignedserve.gateway.http.errors import ApiError, unavailable
from alignedserve.gateway.http.json_pieces import Piece
from alignedserve.gateway.http.reading import too_large
from alignedserve.gateway.limits import Limits
from alignedserve.gateway.model import ServedModel
from alignedserve.process.child import Child, ChildEnded

# The slowest body of this size that was found, 8 KiB of text to be tokenised, takes 16 ms on a core of 2.5 GHz.
INLINE_BYTES = 8 << 10
# A document of this size is tokenised in 0.3 s on such a core.
MEDIUM_BYTES = 256 << 10
# The largest body that is allowed by default, 8 MB of text, takes 6 s.
TIMEOUT_S = 20.0
# The seconds for which a body waits for its turn; after that the client is asked to retry.
TURN_S = 30.0


class Lane:
    """A process that prepares one body after the other, in fair turns."""

    def __init__(self, module: str, greeting: Callable[[], bytes]) -> None:
        self.child = Child(module, 2 * TIMEOUT_S, greeting)
        self.turns = FairQueue()


class Preparer:
    def __init__(self, model: ServedModel, limits: Limits, module: str, is_strict: bool = False) -> None:
        """`module` is that of the processes: one that knows all endpoints (gateway/prepare_process.py). With
        `is_strict`, unknown parameters are refused."""
        self._model = model
        self._limits = limits
        self._is_strict = is_strict
        self._medium, self._large = (Lane(module, self._greeting) for _ in range(2))

    async def start(self) -> None:
        """Starts a process, so that the first body need not wait for it."""
        await self._medium.child.prepare()

    async def call(
        self,
        endpoint: Endpoint,
        body: Sequence[bytes],
        owner: str,
        earlier: Sequence[Piece] | None = None,
    ) -> Prepared:
        """Returns a call for tokens. `body` comes in pieces, and so do the items of the conversation before it, a JSON
        array. `owner` is that of the request's key (http/keys.py). Raises ApiError, which can be ConversationNeeded."""
        found = await self.result(endpoint, body, owner, earlier)
        assert isinstance(found, Prepared)
        return found

    async def answer(self, endpoint: Endpoint, body: Sequence[bytes], owner: str) -> Answered:
        """Returns the answer of an endpoint that needs no engine. Raises ApiError."""
        found = await self.result(endpoint, body, owner)
        assert isinstance(found, Answered)
        return found

    async def aclose(self) -> None:
        await asyncio.gather(self._medium.child.aclose(), self._large.child.aclose())

    async def result(
        self,
        endpoint: Endpoint,
        body: Sequence[bytes],
        owner: str,
        earlier: Sequence[Piece] | None = None,
    ) -> Result:
        """Returns what `endpoint.make` makes of the body. Raises ApiError."""
        num_bytes = sum(map(len, [*body, *(earlier or ())]))
        try:
            return await self._made(endpoint, body, owner, earlier, num_bytes)
        except Expands as found:
            num_added = found.num_bytes
        if num_bytes + num_added > self._limits.max_body_bytes:
            raise too_large(self._limits.max_body_bytes, "with all that it refers to, ")
        return await self._made(endpoint, body, owner, earlier, num_bytes, num_added)

    async def _made(
        self,
        endpoint: Endpoint,
        body: Sequence[bytes],
        owner: str,
        earlier: Sequence[Piece] | None,
        num_bytes: int,
        num_added: int = 0,
    ) -> Result:
        """Has the call made where calls of this size are, with `num_added` bytes that it refers to. Raises ApiError,
        and Expands if it is larger."""
        if num_bytes + num_added <= INLINE_BYTES:
            beside = Beside(None if earlier is None else b"".join(earlier), INLINE_BYTES - num_bytes)
            return endpoint.prepare(b"".join(body), self._model, self._limits, self._is_strict, beside)
        is_medium = num_bytes + num_added <= MEDIUM_BYTES
        lane = self._medium if is_medium else self._large
        max_bytes = self._limits.max_body_bytes
        asked = Asked(
            endpoint.path,
            TIMEOUT_S,
            None if earlier is None else sum(map(len, earlier)),
            # The brackets around a conversation do not count for its limit.
            max(0, (min(MEDIUM_BYTES, max_bytes) if is_medium else max_bytes) - num_bytes),
        )
        try:
            async with lane.turns.turn(owner, TURN_S):
                answer = await lane.child.ask(asked.head, *(earlier or ()), *body)
        except QueueTimeout:
            raise unavailable("others' large bodies are being read") from None
        except ChildEnded as ended:
            raise _refusal(ended) from None
        return _result_of(msgspec.msgpack.decode(answer, type=Told), endpoint)

    def _greeting(self) -> bytes:
        return self._encoded_greeting

    @cached_property
    def _encoded_greeting(self) -> bytes:
        """Returns the greeting, which is kept: encoding a large vocabulary takes a second, for which streams would
        wait each time."""
        model = self._model
        parts = None
        if model.tokenizer:
            files = model.tokenizer.files
            parts = TokenizerParts(files.backend.to_str(), files.special_tokens, files.chat_templates)
        greeting = Greeting(
            model.name,
            model.max_model_len,
            model.vocabulary.size,
            sorted(model.vocabulary.eos_token_ids),
            parts,
            model.parses_special_tokens,
            model.embedding_size,
            self._limits,
            self._is_strict,
            model.adapters,
        )
        return msgspec.msgpack.encode(greeting)


def _refusal(ended: ChildEnded) -> ApiError:
    if ended.status == -signal.SIGALRM:
        return ApiError(400, f"the body is not read within {TIMEOUT_S:g} s")
    return ApiError(400, "the body takes too much memory to read")


def _result_of(told: Told, endpoint: Endpoint) -> Result:
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
