"""KV on its way to this instance that other requests will share. Pure.

Requests with the same prefix are often offered together: the lines of a job, or several turns of one chat. One of them
brings the prefix, and the others wait until it has arrived. They then share it, and only their own KV is copied.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import takewhile

from alignedserve.decode_worker.scheduled_request import ScheduledRequest
from alignedserve.instance.prefix_dedup import SharedBlocks
from alignedserve.scheduling.prefixes import LEAST_COMMON, pays_to_wait
from alignedserve.types import RequestKey


class Arrivals:
    def __init__(self, block_size: int, shared: SharedBlocks) -> None:
        self._block_size = block_size
        self._shared = shared
        # The admitted requests with KV on its way, each with the hashes of the full blocks that it brings.
        self._admitted: list[tuple[ScheduledRequest, Sequence[bytes]]] = []
        # The request that brings each block, by hash.
        self._coming: dict[bytes, ScheduledRequest] = {}

    def look(self, pulling: Container[RequestKey]) -> None:
        """Forgets requests that are not `pulling` any more. Call it before a plan."""
        if all(request.key in pulling for request, _ in self._admitted):
            return
        admitted = [each for each in self._admitted if each[0].key in pulling]
        self._admitted, self._coming = [], {}
        for request, block_hashes in admitted:
            self._add(request, block_hashes)

    def admitted(self, request: ScheduledRequest) -> None:
        if missing := self._shared.missing(request.work):
            self._add(request, missing)

    def _add(self, request: ScheduledRequest, block_hashes: Sequence[bytes]) -> None:
        self._admitted.append((request, block_hashes))
        for block_hash in block_hashes:
            other = self._coming.setdefault(block_hash, request)
            if request.is_rt and not other.is_rt:
                # RT does not wait for BE. Other RT requests follow the RT request.
                self._coming[block_hash] = request

    def had_better_wait(self, request: ScheduledRequest) -> bool:
        """Returns whether other requests bring enough of the KV that this candidate lacks. Best effort waits for any
        prefix that is worth it. Real time waits only if it has to wait for most of that KV in any case."""
        if not self._coming or not (missing := self._shared.missing(request.work)):
            return False

        def is_coming(block_hash: bytes) -> bool:
            other = self._coming.get(block_hash)
            return other is not None and (other.is_rt or not request.is_rt)

        num_common = self._block_size * sum(1 for _ in takewhile(is_coming, missing))
        if request.is_rt:
            return pays_to_wait(num_common, self._block_size * len(missing))
        return num_common >= LEAST_COMMON
