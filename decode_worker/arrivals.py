"""KV on its way to this instance that other requests will share. Pure.

Requests with the same prefix are often offered together, such as the lines of a job. One of them brings the prefix, and
the others wait until it has arrived. They then share it, and only their own KV is copied.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import chain, takewhile

from alignedserve.decode_worker.scheduled_request import ScheduledRequest
from alignedserve.instance.prefix_cache import PrefixCache
from alignedserve.scheduling.prefixes import LEAST_COMMON
from alignedserve.types import RequestKey


class Arrivals:
    def __init__(self, block_size: int, prefix_cache: PrefixCache) -> None:
        self._block_size = block_size
        self._prefix_cache = prefix_cache
        # The hashes of the full blocks that each admitted request brings, and of all of them.
        self._by_request: dict[RequestKey, Sequence[bytes]] = {}
        self._coming: set[bytes] = set()

    def look(self, pulling: Container[RequestKey]) -> None:
        """Forgets requests that are not `pulling` any more. Call it before a plan."""
        if arrived := [key for key in self._by_request if key not in pulling]:
            for key in arrived:
                del self._by_request[key]
            self._coming = set(chain.from_iterable(self._by_request.values()))

    def admitted(self, request: ScheduledRequest) -> None:
        if missing := self._prefix_cache.missing(request.work):
            self._by_request[request.key] = missing
            self._coming.update(missing)

    def should_wait(self, request: ScheduledRequest) -> bool:
        """Returns whether other requests bring KV that this candidate lacks, and enough of it. Real time does not wait,
        because it would join the batch an iteration later."""
        if request.is_rt or not self._coming:
            return False
        missing = self._prefix_cache.missing(request.work)
        num_common = self._block_size * sum(1 for _ in takewhile(self._coming.__contains__, missing))
        return num_common >= LEAST_COMMON
