"""Moves the KV of candidates on the prefill instance from which decode instances pull them.

    loading (its KV is being copied from the pool) -> staged -> gone, when it is pulled or unstaged

A candidate that is unstaged during a pull holds its blocks until the pull has ended. A new order for the same request
waits for that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from alignedserve.instance.columns import pool_blocks
from alignedserve.instance.executor import Executor, Transfers
from alignedserve.prefill_worker.schedule import PrefillSchedule
from alignedserve.protocol.messages import AnyMessage, Failed, Gone, Work
from alignedserve.transport.completions import Done, Outcome
from alignedserve.transport.runs import Pairs
from alignedserve.types import BlockId, RequestId, RequestKey


class Neighbour(Protocol):
    """The worker's services for staging."""

    def load(self, key: RequestKey, pairs: Pairs, done: Done, is_urgent: bool) -> None: ...

    def abandon(self, key: RequestKey) -> None:
        """Stops the load of the request."""

    def staged(self, key: RequestKey) -> None:
        """Adds the request to the staged ones in the next report."""

    def say(self, message: AnyMessage) -> None: ...


@dataclass(eq=False)
class Candidate:
    blocks: list[BlockId]
    is_staged: bool = False
    is_leaving: bool = False
    # The message to send and the call to make when it is gone.
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
        # Candidates that hold blocks.
        self._candidates: dict[RequestKey, Candidate] = {}

    def __len__(self) -> int:
        return len(self._candidates)

    def when_gone(self, key: RequestKey, order: Callable[[], None]) -> None:
        """Carries out an order for a request: immediately, or when the request is gone if it is leaving."""
        candidate = self._candidates.get(key)
        if candidate and candidate.is_leaving:
            candidate.then = order
        else:
            order()

    def start(self, work: Work) -> None:
        """Starts loading a candidate. The schedule has reserved its blocks."""
        key, span, num_cached = work.request.key, self._engine.span, work.num_cached
        blocks = self._engine.lease(_owner(key), span.num_held(num_cached, num_cached))
        self._candidates[key] = Candidate(blocks)
        end, num_passed = span.num_columns(num_cached), span.num_passed(num_cached)
        pairs = list(zip(blocks, pool_blocks(span, work.blocks, 0, end, num_passed), strict=True))
        self._worker.load(key, pairs, self._loaded, work.deadlines.is_rt)

    def drop(self, key: RequestKey, last_message: Gone | None = None) -> bool:
        """Unstages the candidate. Returns False and changes nothing if it has no blocks here."""
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
        """Handles the end of staging: the candidate was pulled or withdrawn."""
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
