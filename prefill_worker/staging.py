"""Candidates of decode instances, at the prefill instance from which they are pulled.

    loading (KV on its way from the pool) -> staged -> gone, when they are pulled or unstaged

What is being pulled just then is gone when that has ended, and until then its blocks are held; an order for the same
request that comes meanwhile waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from alignedserve.instance.executor import Executor, Transfers
from alignedserve.prefill_worker.schedule import PrefillSchedule
from alignedserve.protocol.messages import AnyMessage, Failed, Gone, Work
from alignedserve.transport.completions import Done, Outcome
from alignedserve.transport.runs import Pairs
from alignedserve.types import BlockId, RequestId, RequestKey


class Neighbour(Protocol):
    """The worker."""

    def load(self, key: RequestKey, pairs: Pairs, done: Done, is_urgent: bool) -> None: ...

    def abandon(self, key: RequestKey) -> None:
        """Stops the load of this request."""

    def staged(self, key: RequestKey) -> None:
        """To be reported."""

    def say(self, message: AnyMessage) -> None: ...


@dataclass(eq=False)
class Candidate:
    blocks: list[BlockId]
    is_staged: bool = False
    is_leaving: bool = False
    # what to say when it is gone, and what to do then
    last_message: Failed | Gone | None = None
    then: Callable[[], None] | None = None


class Staging:
    def __init__(
        self, engine: Executor, schedule: PrefillSchedule, transfers: Transfers, worker: Neighbour
    ) -> None:
        self._engine = engine
        self._schedule = schedule
        self._transfers = transfers
        self._worker = worker
        # those that hold blocks
        self._candidates: dict[RequestKey, Candidate] = {}

    def __len__(self) -> int:
        return len(self._candidates)

    def when_gone(self, key: RequestKey, order: Callable[[], None]) -> None:
        """Carries out an order for a request: at once, unless it is here and leaving."""
        candidate = self._candidates.get(key)
        if candidate and candidate.is_leaving:
            candidate.then = order
        else:
            order()

    def start(self, work: Work) -> None:
        """The schedule has found it room."""
        key, num_blocks = work.request.key, self._engine.format.num_blocks(work.num_cached)
        blocks = self._engine.lease(_owner(key), num_blocks)
        self._candidates[key] = Candidate(blocks)
        pairs = list(zip(blocks, work.blocks[:num_blocks], strict=True))
        self._worker.load(key, pairs, self._loaded, work.deadlines.is_rt)

    def drop(self, key: RequestKey, last_message: Gone | None = None) -> bool:
        """False, and nothing changed, if it has no blocks here."""
        candidate = self._candidates.get(key)
        if candidate is None:
            return False
        candidate.is_leaving, candidate.then = True, None
        candidate.last_message = last_message or candidate.last_message
        if candidate.is_staged:
            self._transfers.unstage(key)
        else:
            self._schedule.unstage([key])
            self._worker.abandon(key)
        return True

    def _loaded(self, outcome: Outcome) -> None:
        (key,) = outcome.keys
        candidate = self._candidates[key]
        if outcome.error is not None and not candidate.is_leaving:
            self._schedule.unstage([key])
            candidate.last_message = Failed(key, "load", outcome.error)
        if self._schedule.staged(key):
            candidate.is_staged = True
            self._transfers.stage(key, candidate.blocks, self._left_buffer)
            self._worker.staged(key)
        else:
            self._leave(key)

    def _left_buffer(self, outcome: Outcome) -> None:
        """Pulled or withdrawn."""
        (key,) = outcome.keys
        self._schedule.unstage([key])
        self._leave(key)

    def _leave(self, key: RequestKey) -> None:
        candidate = self._candidates.pop(key)
        self._engine.give_back(_owner(key))
        if candidate.last_message:
            self._worker.say(candidate.last_message)
        if candidate.then:
            candidate.then()


def _owner(key: RequestKey) -> RequestId:
    return RequestId(f"staged {key}")
