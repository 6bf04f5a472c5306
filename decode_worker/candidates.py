"""Requests that were offered and are not admitted yet: those that belong with the ones that run, and the batch that
runs next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, ValuesView
from itertools import chain

from alignedserve.decode_worker.members import Member, Members, member_of
from alignedserve.instance.shares import NothingShared, Shares
from alignedserve.protocol.messages import Work
from alignedserve.types import InstanceId, RequestKey


class Candidates:
    def __init__(self, max_model_len: int, shares: Shares | None = None) -> None:
        self._max_model_len = max_model_len
        self._shares = shares or NothingShared()
        self._requests: Members = {}
        self._batch: Members = {}
        self._num_batches = 0
        # the one that runs
        self._running_batch = 0

    def begin_batch(self) -> None:
        self._num_batches += 1

    def add(self, work: Work, is_batch: bool, source: InstanceId | None) -> None:
        into = self._batch if is_batch else self._requests
        names = () if work.num_cached else self._shares.names(work)
        into[work.request.key] = member_of(work, source, self._num_batches, self._max_model_len, names)

    def take(self, member: Member) -> None:
        """It is admitted. One of the candidate batch makes that the batch that runs; a candidate request joins it."""
        if self._batch.pop(member.key, None):
            self._running_batch = member.batch
        else:
            del self._requests[member.key]
        member.batch = self._running_batch

    def drop(self, key: RequestKey) -> bool:
        return any(members.pop(key, None) for members in (self._requests, self._batch))

    def clear(self) -> None:
        self._requests.clear()
        self._batch.clear()

    @property
    def requests(self) -> ValuesView[Member]:
        return self._requests.values()

    @property
    def batch(self) -> ValuesView[Member]:
        return self._batch.values()

    @property
    def rt(self) -> Iterable[Member]:
        return (member for member in self if member.is_rt)

    def __iter__(self) -> Iterator[Member]:
        """Candidate requests first."""
        return chain(self._requests.values(), self._batch.values())

    def __len__(self) -> int:
        return len(self._requests) + len(self._batch)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._requests or key in self._batch
