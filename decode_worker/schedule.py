"""Decides what a decode instance does at its next iteration boundary. Pure: it has no tensors and no clock.

The state is the running batch R, the candidate requests Q (which may join R), the candidate batch B (which runs next),
and the blocks of each request (`candidates.py`, `block_table.py`, `instance/memory.py`). Some candidates wait for the
same KV as others (`arrivals.py`). After each iteration the policy decides which requests leave, join and run
(`boundary.py`). The outcomes are reported to `blocks`, and to the methods here.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from msgspec.structs import replace

from alignedserve.decode_worker.arrivals import Arrivals
from alignedserve.decode_worker.block_table import BlockTable
from alignedserve.decode_worker.boundary import Boundary
from alignedserve.decode_worker.candidates import Candidates
from alignedserve.decode_worker.plan import DecodePlan
from alignedserve.instance.iteration_times import IterationForecast
from alignedserve.instance.memory import BlockManager
from alignedserve.instance.prefix_cache import PrefixCache
from alignedserve.instance.prefix_dedup import PrefixDedup
from alignedserve.protocol.messages import InstanceLimits, Work
from alignedserve.scheduling.policy import DecodePart
from alignedserve.timing.estimate import Estimate
from alignedserve.types import InstanceId, RequestKey


class DecodeSchedule:
    def __init__(
        self,
        limits: InstanceLimits,
        policy: DecodePart,
        estimate: Estimate | None = None,
        memory: BlockManager | None = None,
        prefix_cache: PrefixCache | None = None,
        max_parts: int = 0,
    ) -> None:
        """`estimate` predicts the duration of iterations; None if nothing does. `memory` has the instance's blocks, all
        free; `prefix_cache` finds those that prompts may share. `max_parts` is the number of blocks for which host
        memory has room for overwritten KV; 0 if blocks are not shared from both ends (`shared_ends.py`)."""
        self.memory = memory or BlockManager(limits.num_blocks, limits.span, counts_once=True)
        prefix_cache = prefix_cache or PrefixCache(self.memory, is_enabled=False)
        self.limits = replace(limits, enable_prefix_caching=prefix_cache.is_enabled)
        self.policy = policy
        self.forecast = IterationForecast(estimate)
        self.candidates = Candidates(limits.max_model_len, prefix_cache)
        self.blocks = BlockTable(limits, self.memory, prefix_cache, max_parts)
        self._dedup = PrefixDedup(limits.block_size, prefix_cache, policy.is_ahead)
        self._shared_saving = limits.block_size * estimate.shared_saving if estimate else 0.0
        self._arrivals = Arrivals(limits.block_size, prefix_cache)
        self._boundary = Boundary(
            limits, self.candidates, self.blocks, prefix_cache, self._dedup, self._arrivals
        )
        # When the last iteration was planned.
        self._planned_s = 0.0

    def plan(self, now: float) -> DecodePlan:
        """Plans the next iteration, and allocates the blocks that it needs. The plan always fits."""
        at = self._boundary
        self._planned_s = now
        at.begin(now)
        self.blocks.free_passed()
        if self.limits.enable_prefix_caching:
            self._arrivals.look(self.blocks.pulling)
            self._dedup.look(self.policy.in_order(self.blocks.computing, now), now)
            if self._shared_saving:
                self._count_saved()
        self.policy.plan(at)
        self.memory.settle()
        if at.plan.goes_on:
            self.forecast.plan(at.load)
        return at.plan

    def _count_saved(self) -> None:
        """Lets lengths for the cost model contain KV that is read once for several requests only once."""
        for request in self.blocks.running.values():
            request.num_saved = int(self._shared_saving * self.memory.num_read_by_others(request))

    # ---- orders -----------------------------------------------------------------------------------------------------

    def offer(
        self,
        works: Iterable[Work],
        is_batch: bool,
        source: InstanceId | None = None,
        batch: int = 0,
        replaces: bool = False,
    ) -> None:
        """Makes the requests candidates. `batch` and `replaces`: see Offer. Raises if one is already here."""
        if replaces:
            self.candidates.first_batch_to_stay = batch
        for work in works:
            key = work.request.key
            if key in self.candidates or key in self.blocks:
                raise RuntimeError(f"request {key}: offered, but it is here already")
            self.candidates.add(work, is_batch, batch, source)

    def drop_candidates(self) -> list[RequestKey]:
        """Forgets all candidates. Returns the requests that are being pulled, which the caller must abort."""
        self.candidates.clear()
        return list(self.blocks.pulling)

    def abort(self, key: RequestKey) -> bool:
        """Forgets the request in any state. Returns True if its blocks are held until a running copy is reported."""
        return not self.candidates.drop(key) and self.blocks.abort(key)

    # ---- what came of plans -----------------------------------------------------------------------------------------

    def computed(self, key: RequestKey, count: int) -> None:
        """Reports that `count` pending tokens were computed, without sampling a token."""
        self.blocks.running[key].num_cached += count

    def sampled(self, keys: Iterable[RequestKey]) -> None:
        running = self.blocks.running
        for key in keys:
            request = running[key]
            request.num_cached = request.num_tokens
            request.num_tokens += 1
            if request.num_tokens == request.num_prompt + 1:
                request.first_s = self._planned_s

    def took(self, seconds: float, outside_s: float = 0.0) -> None:
        """See `IterationForecast.took`."""
        self.forecast.took(seconds, outside_s)
        self.policy.took(seconds)

    # ---- counts -----------------------------------------------------------------------------------------------------

    def is_mixed(self, plan: DecodePlan) -> bool:
        """Returns whether the plan runs requests of several batches, or of a batch and of none."""
        if not self.candidates.running_batch:
            return False
        running = self.blocks.running
        keys = chain(plan.run, (key for key, _ in plan.chunks))
        return len({running[key].batch for key in keys}) > 1

    def check(self) -> None:
        """Raises unless every block is either held once or free."""
        self.blocks.check()

    def check_idle(self) -> None:
        self.check()
        num_left = len(self.candidates) + len(self.blocks) + self.blocks.ends.num_left
        if num_left:
            raise RuntimeError(f"idle, but {num_left} requests are left")
