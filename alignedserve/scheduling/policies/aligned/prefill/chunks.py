"""Cuts the prompt chunks of a prefill instance's next iteration. They end on block boundaries. Pure.

The iteration's predicted time is bounded (AccelGen's token budget, found by bisection on the estimate), so that the
next request to arrive does not wait longer than that. Attention costs more at later positions, so later chunks of a
prompt are shorter.

Within a class, prompts are taken in order. The first that does not fit whole gets what is left. At most one prompt of
a class is in pieces: while it is unfinished, it gets what is left, and no other is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from alignedserve.scheduling.boundary import PrefillRequest
from alignedserve.timing.cost import ChunkCosts
from alignedserve.timing.estimate import Estimate
from alignedserve.types import RequestKey

# With a floor, the bound is at least this multiple of the time that the first block takes. A bound that a single block
# breaks can't be kept anyway.
FLOOR = 1.25


@dataclass
class Cut:
    """The chunks of one iteration while they are chosen."""

    estimate: Estimate
    block_size: int
    num_left: int
    # The number of tokens computed before, and the number to compute, of each chunk.
    chunks: dict[RequestKey, tuple[int, int]] = field(default_factory=dict)
    requests: list[PrefillRequest] = field(default_factory=list)
    # The prompt that this leaves in pieces, by whether it is RT.
    in_pieces: dict[bool, RequestKey] = field(default_factory=dict)
    _costs: ChunkCosts = field(init=False)

    def __post_init__(self) -> None:
        self._costs = self.estimate.chunks_together()

    @property
    def seconds(self) -> float:
        return self.estimate.iteration([*self.chunks.values()], []) if self.chunks else 0.0

    def num_tokens(self, requests: Iterable[PrefillRequest]) -> int:
        """Returns the number of tokens of these requests."""
        return sum(self.chunks[each.key][1] for each in requests if each.key in self.chunks)

    def seconds_without(self, requests: Iterable[PrefillRequest]) -> float:
        left = self.chunks.keys() - {request.key for request in requests}
        return self.estimate.iteration([self.chunks[key] for key in left], []) if left else 0.0

    def add(
        self,
        requests: Sequence[PrefillRequest],
        begun: PrefillRequest | None,
        bound_s: float,
        has_floor: bool,
    ) -> PrefillRequest | None:
        """Adds chunks of these requests, which are in order and of one class. Returns the request that it has cut, or
        None if it has cut none.

        `begun` is the request that is in pieces already. With a floor, it takes at least one block of the first
        request, or all tokens that are left of the budget.
        """
        queue = [request for request in requests if request.key not in self.chunks]
        while queue and self.num_left:
            request, count = queue[0], self._most(queue[0], bound_s, has_floor)
            if count < request.num_pending and begun in queue:
                request, count = begun, self._most(begun, bound_s, has_floor)
            if count:
                self._take(request, count)
            if count < request.num_pending:
                return request if count else None
            queue.remove(request)
            has_floor = False
        return None

    def _take(self, request: PrefillRequest, count: int) -> None:
        self.chunks[request.key] = (request.num_computed, count)
        self.requests.append(request)
        self._costs.add(request.num_computed, count)
        self.num_left -= count

    def _most(self, request: PrefillRequest, bound_s: float, has_floor: bool) -> int:
        """Returns the number of the request's tokens that fit, up to a block boundary or the prompt's end."""
        before, most = request.num_computed, min(request.num_pending, self.num_left)
        one_block = min(self.block_size - before % self.block_size, most)
        if has_floor:
            bound_s = max(bound_s, FLOOR * self._seconds_with(before, one_block))
        if most == request.num_pending and self._seconds_with(before, most) <= bound_s:
            return most
        low, high = before // self.block_size, (before + most) // self.block_size
        while low < high:
            middle = (low + high + 1) // 2
            if self._seconds_with(before, middle * self.block_size - before) <= bound_s:
                low = middle
            else:
                high = middle - 1
        count = max(low * self.block_size - before, 0)
        # With a floor, `count` is 0 only if fewer tokens are left than the block needs.
        return count or (one_block if has_floor and not self.chunks else 0)

    def _seconds_with(self, before: int, count: int) -> float:
        return self.estimate.corrected(self._costs.seconds_with(before, count))
