"""Requests that were offered and not admitted yet: candidate requests, which may join the running batch, and the
candidate batch, which runs next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence, ValuesView
from itertools import chain
from operator import attrgetter

from alignedserve.decode_worker.scheduled_request import (
    ScheduledRequest,
    ScheduledRequests,
    scheduled_request,
)
from alignedserve.instance.owners import in_turn
from alignedserve.instance.prefix_cache import PrefixCache
from alignedserve.protocol.messages import Work
from alignedserve.types import InstanceId, RequestKey


class Candidates:
    def __init__(self, max_model_len: int, prefix_cache: PrefixCache) -> None:
        self._max_model_len = max_model_len
        self._prefix_cache = prefix_cache
        self._requests: ScheduledRequests = {}
        self._batch: ScheduledRequests = {}
        # Number of candidate requests of each owner.
        self._num_of: Counter[str] = Counter()
        # Number of the running batch.
        self.running_batch = 0
        # Batches with smaller numbers must leave.
        self.first_batch_to_stay = 0

    def add(self, work: Work, is_batch: bool, batch: int, source: InstanceId | None) -> None:
        into = self._batch if is_batch else self._requests
        block_hashes: Sequence[bytes] = ()
        if work.num_cached and not work.is_first:
            self._prefix_cache.expect(work)
        else:
            block_hashes = self._prefix_cache.block_hashes(work)
        into[work.request.key] = scheduled_request(work, source, batch, self._max_model_len, block_hashes)
        if not is_batch:
            self._num_of[work.request.owner] += 1

    def take(self, scheduled: ScheduledRequest) -> None:
        """Removes an admitted request. If it is in the candidate batch, that becomes the running batch."""
        if self._batch.pop(scheduled.key, None):
            self.running_batch = scheduled.batch
        else:
            self._count_out(self._requests.pop(scheduled.key))

    def drop(self, key: RequestKey) -> bool:
        if request := self._requests.pop(key, None):
            self._count_out(request)
        return bool(request or self._batch.pop(key, None))

    def _count_out(self, request: ScheduledRequest) -> None:
        self._num_of[request.owner] -= 1
        if not self._num_of[request.owner]:
            del self._num_of[request.owner]

    def clear(self) -> None:
        self._requests.clear()
        self._batch.clear()
        self._num_of.clear()
        self.first_batch_to_stay = 0

    @property
    def requests(self) -> ValuesView[ScheduledRequest]:
        return self._requests.values()

    @property
    def owners_compete(self) -> bool:
        return len(self._num_of) > 1

    def in_turn(self, running: Iterable[ScheduledRequest]) -> list[ScheduledRequest]:
        """Returns the candidate requests in the order in which they were offered. If they have several owners, one that
        has less here goes first, as if each candidate before it ran."""
        if not self.owners_compete:
            return [*self._requests.values()]
        had = Counter[Hashable](each.owner for each in running)
        return in_turn(self._requests.values(), attrgetter("owner"), had)

    @property
    def batch(self) -> ValuesView[ScheduledRequest]:
        return self._batch.values()

    @property
    def rt(self) -> Iterable[ScheduledRequest]:
        return (request for request in self if request.is_rt)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        """Iterates over candidate requests first."""
        return chain(self._requests.values(), self._batch.values())

    def __len__(self) -> int:
        return len(self._requests) + len(self._batch)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._requests or key in self._batch
