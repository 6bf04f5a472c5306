"""Compiles schemas, regexes and grammars in another process (text/grammar_process.py), which stops those that take too
much time or memory. Instances compile them again, but never receive one that is refused here.

There are two lanes. In the first, each may take a little CPU time, which suffices for ordinary ones. One that takes
longer starts again in the second lane with its full time limit, so that ordinary ones do not wait for it. In both, the
next turn goes to the owner with the least recent use. An owner is the owner of an API key, if there are keys.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

from alignedserve.engine.request import Vocabulary
from alignedserve.gateway.grammars.compiler_process import CompilerProcess
from alignedserve.gateway.limits.fair_queue import FairQueue
from alignedserve.process.child import ChildEnded, NotStarted
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.types import InvalidRequest

# Results that are kept: a hash and a line of text each.
MAX_KEPT = 4096
# CPU seconds in the first lane. Schemas with several hundred properties take less.
SHORT_S = 0.05
# Wall-clock seconds per CPU second: other processes may have the cores.
CLOCK_FACTOR = 4
# Seconds that a request waits for its turn, if grammars of others use all their time.
TURN_S = 10.0
# Seconds until a grammar that took too long is tried again: the machine may be less busy by then.
SLOW_KEPT_S = 300.0
# Signals that end a child process at its time limit.
_TOO_SLOW = ("SIGALRM", "SIGPROF")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Found:
    # What is wrong with the grammar. None: it is valid.
    problem: str | None = None
    # Whether it took too long. Then nothing else is known about it.
    is_slow: bool = False
    # When it is tried again, by time.monotonic().
    until_s: float = float("inf")


class Compiler:
    def __init__(self, tokenizer: Tokenizer | None, vocabulary: Vocabulary) -> None:
        has_grammars = tokenizer is not None and vocabulary.eos_token_ids
        self._process = CompilerProcess(tokenizer, vocabulary) if tokenizer and has_grammars else None
        self._short = FairQueue()
        self._long = FairQueue()
        self._kept: OrderedDict[bytes, _Found] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[_Found]] = {}

    async def prepare(self) -> None:
        """Starts the process, so that the first grammar need not wait for it."""
        try:
            if self._process is not None:
                await self._process.started()
        except NotStarted as ended:
            logger.warning("grammars: the vocabulary could not be loaded, status %d", ended.status)

    async def check(self, wanted: StructuredOutputsParams, timeout_s: float, owner: str = "") -> None:
        """Raises InvalidRequest with the grammar's error, TimeoutError, or QueueTimeout. `timeout_s` is CPU time.
        Requests without an `owner` count as one owner."""
        # Results are kept for each owner: otherwise the time would tell whether another owner has used the grammar.
        key = hashlib.sha256(repr((owner, wanted.identity)).encode()).digest()
        found = self._kept.get(key)
        if found is None or found.until_s < time.monotonic():
            # It continues if this request is cancelled: others of its owner may wait for it, too.
            found = await asyncio.shield(self._ask(key, wanted, timeout_s, owner))
            self._keep(key, found)
        self._kept.move_to_end(key)
        if found.is_slow:
            raise TimeoutError
        if found.problem is not None:
            raise InvalidRequest(found.problem)

    async def aclose(self) -> None:
        asking = list(self._asking.values())
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        if self._process is not None:
            await self._process.aclose()

    def _keep(self, key: bytes, found: _Found) -> None:
        self._kept[key] = found
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def _ask(
        self, key: bytes, wanted: StructuredOutputsParams, timeout_s: float, owner: str
    ) -> asyncio.Task[_Found]:
        if key not in self._asking:
            self._asking[key] = asyncio.create_task(self._find(wanted, timeout_s, owner))
            self._asking[key].add_done_callback(lambda asking: self._over(key, asking))
        return self._asking[key]

    def _over(self, key: bytes, asking: asyncio.Task[_Found]) -> None:
        del self._asking[key]
        if not asking.cancelled():
            # Requests that wait get the exception. Retrieving it here avoids asyncio's warning if none waits.
            asking.exception()

    async def _find(self, wanted: StructuredOutputsParams, timeout_s: float, owner: str) -> _Found:
        if self._process is None:
            return _Found(
                "structured_outputs: needs a tokenizer and an end-of-sequence token, and this model lacks one"
            )
        # The process starts outside of any owner's turn.
        await self.prepare()
        async with self._short.turn(owner, TURN_S):
            found = await self._compiled(self._process, wanted, min(SHORT_S, timeout_s))
        if not found.is_slow:
            return found
        async with self._long.turn(owner, TURN_S):
            return await self._compiled(self._process, wanted, timeout_s)

    async def _compiled(
        self, process: CompilerProcess, wanted: StructuredOutputsParams, cpu_s: float
    ) -> _Found:
        later_s = time.monotonic() + SLOW_KEPT_S
        try:
            answer = await process.compile(wanted, CLOCK_FACTOR * cpu_s, cpu_s)
        except ChildEnded:
            try:
                # This grammar did not end the process: its child processes do the compiling.
                answer = await process.compile(wanted, CLOCK_FACTOR * cpu_s, cpu_s)
            except ChildEnded:
                return _Found(
                    "structured_outputs: not possible with this model's vocabulary", until_s=later_s
                )
        if "ended" not in answer:
            return _Found(answer["problem"])
        if answer["ended"] in _TOO_SLOW:
            return _Found(is_slow=True, until_s=later_s)
        return _Found(f"structured_outputs.{wanted.kind}: too large to be compiled")
