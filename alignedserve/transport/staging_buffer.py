"""The blocks of staged requests, which a prefill instance holds ready for pulling.

From `put` until its `done` is called, a request's blocks must be neither freed nor written. `done` is called once:
without an error after a pull, with one after a withdrawal. After a failed transfer the blocks stay for the next pull.
The instance's loop and the sender's threads use this.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.transport.completions import Completions, Done, Outcome, TransferId, TransferIds
from alignedserve.types import BlockId, Epoch, RequestKey


class NotStaged(LookupError):
    """The requests can't be pulled."""


@dataclass
class _StagedRequest:
    transfer: TransferId
    blocks: list[BlockId]
    done: Done
    is_being_pulled: bool = False
    is_withdrawn: bool = False


class StagingBuffer:
    def __init__(self, epoch: Epoch, completions: Completions) -> None:
        self._ids = TransferIds(epoch)
        self._completions = completions
        self._staged: dict[RequestKey, _StagedRequest] = {}
        self._lock = threading.Lock()

    def put(self, key: RequestKey, blocks: Sequence[BlockId], done: Done) -> TransferId:
        with self._lock:
            if key in self._staged:
                raise RuntimeError(f"request {key} is in the staging buffer already")
            staged = self._staged[key] = _StagedRequest(self._ids.next(), list(blocks), done)
            return staged.transfer

    def withdraw(self, key: RequestKey) -> None:
        """Withdraws the request; during a pull, only if that pull fails. Safe to repeat."""
        with self._lock:
            if key in self._staged:
                self._staged[key].is_withdrawn = True
                self._drop_withdrawn(key)

    def begin_pull(self, keys: Sequence[RequestKey], num_blocks: Sequence[int]) -> list[BlockId]:
        """Returns all blocks of the requests, in the order of the requests. Changes nothing if it raises NotStaged."""
        with self._lock:
            for key, num in zip(keys, num_blocks, strict=True):
                self._check(key, num)
            if len(set(keys)) < len(keys):
                raise NotStaged(f"{len(keys)} requests asked for, {len(set(keys))} different ones")
            for key in keys:
                self._staged[key].is_being_pulled = True
            return [block for key in keys for block in self._staged[key].blocks]

    def finish_pull(self, keys: Sequence[RequestKey]) -> None:
        with self._lock:
            for key in keys:
                self._end(key, error=None)

    def cancel_pull(self, keys: Sequence[RequestKey]) -> None:
        """Makes the requests available again after a failed transfer."""
        with self._lock:
            for key in keys:
                self._staged[key].is_being_pulled = False
                self._drop_withdrawn(key)

    def clear(self) -> None:
        """Withdraws all requests."""
        for key in list(self._staged):
            self.withdraw(key)

    def __len__(self) -> int:
        return len(self._staged)

    @property
    def num_being_pulled(self) -> int:
        with self._lock:
            return sum(staged.is_being_pulled for staged in self._staged.values())

    def _check(self, key: RequestKey, num_blocks: int) -> None:
        staged = self._staged.get(key)
        if staged is None or staged.is_withdrawn:
            raise NotStaged(f"request {key} is not staged")
        if staged.is_being_pulled:
            raise NotStaged(f"request {key} is being pulled already")
        if len(staged.blocks) != num_blocks:
            raise NotStaged(f"request {key}: {len(staged.blocks)} blocks staged, {num_blocks} asked for")

    def _drop_withdrawn(self, key: RequestKey) -> None:
        staged = self._staged[key]
        if staged.is_withdrawn and not staged.is_being_pulled:
            self._end(key, error="withdrawn")

    def _end(self, key: RequestKey, error: str | None) -> None:
        staged = self._staged.pop(key)
        self._completions.post(staged.done, Outcome(staged.transfer, "send", (key,), error))
