"""Keeps complete answers until the next turns of their chats come, as long as these usually take. Pure."""

from __future__ import annotations

from typing import NamedTuple

from alignedserve.kvpool.block_allocator import BlockAllocator
from alignedserve.kvpool.return_times import ReturnTimes
from alignedserve.protocol.messages import Reserve
from alignedserve.types import RequestKey


class _Answer(NamedTuple):
    reserve: Reserve
    ended_s: float


class NextTurns:
    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._times = ReturnTimes()
        # Answers that instances are saving.
        self._saving: dict[RequestKey, _Answer] = {}

    @property
    def outcomes(self) -> dict[str, int]:
        """See ReturnTimes."""
        return dict(self._times.outcomes)

    def reserved(self, reserve: Reserve, num_found: int | None, now: float) -> None:
        """Handles a prompt or an answer with the number of tokens that were found. None: there was no room."""
        if reserve.hashes and reserve.awaits:
            # Times are also learned from answers that the pool has no room for.
            self._times.ended(reserve.hashes, reserve.owner, now)
            if num_found is not None:
                self._saving[reserve.key] = _Answer(reserve, now)
        elif reserve.hashes and reserve.follows and num_found is not None:
            num_blocks = num_found // self._block_size
            self._times.came(reserve.hashes, reserve.owner, reserve.follows, num_blocks, now)

    def committed(self, key: RequestKey) -> None:
        """Promises an answer that is saved."""
        if (answer := self._saving.pop(key, None)) and self._allocator.may_promise:
            hashes, owner, awaits = answer.reserve.hashes, answer.reserve.owner, answer.reserve.awaits
            until = answer.ended_s + self._times.wait_s(owner, awaits)
            if self._allocator.promise(hashes, owner, until):
                self._times.promised(hashes[-1], owner, until)
            else:
                self._times.outcomes["refused"] += 1

    def released(self, key: RequestKey) -> None:
        self._saving.pop(key, None)

    def expire(self, now: float) -> None:
        self._allocator.end_promises(now)
        self._times.expire(now)
