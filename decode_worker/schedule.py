"""What a decode instance does at its next iteration boundary. Pure: no tensors, no clock, counts of blocks only.

The running batch R, candidate requests Q (they belong with R) and the candidate batch B (it runs next) are kept here,
and who holds which blocks (`candidates.py`, `holders.py`). After each iteration the policy says who leaves, who joins
and who runs (`boundary.py`); what becomes of that is heard here.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from alignedserve.decode_worker.block_table import BlockTable
from alignedserve.decode_worker.boundary import Boundary
from alignedserve.decode_worker.candidates import Candidates
from alignedserve.decode_worker.plan import DecodePlan
from alignedserve.instance.prefix_dedup import PrefixDedup
from alignedserve.instance.prefix_lookup import NoPrefixCache, PrefixLookup
from alignedserve.protocol.messages import InstanceLimits, Work
from alignedserve.scheduling.policies.base import DecodePart
from alignedserve.timing.estimate import Estimate
from alignedserve.types import InstanceId, RequestKey


class DecodeSchedule:
    def __init__(
        self,
        limits: InstanceLimits,
        policy: DecodePart,
        estimate: Estimate | None = None,
        lookup: PrefixLookup | None = None,
    ) -> None:
        """`estimate`: how long iterations will take; None: nobody knows.
        `lookup`: None, where prompts share no KV.
        """
        self.limits = replace(limits, enable_prefix_caching=lookup is not None)
        lookup = lookup or NoPrefixCache()
        self._policy = policy
        self._estimate = estimate
        self._candidates, self._block_table = Candidates(limits.max_model_len, lookup), BlockTable(limits)
        self._dedup = PrefixDedup(limits.block_size, lookup, policy.is_ahead)
        self._boundary = Boundary(limits, self._candidates, self._block_table, lookup, self._dedup)
        # of the iteration that was planned last
        self._predicted_s = 0.0

    def plan(self, now: float) -> DecodePlan:
        """Takes the blocks that it plans with. What it plans fits."""
        at = self._boundary
        at.begin(now)
        if self.limits.enable_prefix_caching:
            self._dedup.look(self._policy.in_order(self._block_table.beginning, now), now)
        self._policy.plan(at)
        if self._estimate and at.plan.goes_on:
            self._predicted_s = self._estimate.iteration(at.chunks, at.lengths)
        return at.plan

    # ---- orders -----------------------------------------------------------------------------------------------------

    def offer(self, works: Iterable[Work], is_batch: bool, source: InstanceId | None = None) -> None:
        """Candidates from here on. A batch is one by itself, also beside what is left of an earlier one."""
        if is_batch:
            self._candidates.begin_batch()
        for work in works:
            key = work.request.key
            if key in self._candidates or key in self._block_table:
                raise RuntimeError(f"request {key}: offered, but it is here already")
            self._candidates.add(work, is_batch, source)

    def expect(self, num_prefilling: int, num_ready: int, now: float) -> None:
        """Real time that will be offered in a moment: prompts that are computed, and those that have been."""
        self._policy.expect(num_prefilling, num_ready, now)

    def drop_candidates(self) -> list[RequestKey]:
        """Takes all of them back. Returns those that are being pulled: they are left to `abort`."""
        self._candidates.clear()
        return list(self._block_table.pulling)

    def evict(self, key: RequestKey) -> bool:
        """It runs no more; its blocks are held until `evicted`. False, and nothing changed, if it does not run."""
        return self._block_table.evict(key)

    def abort(self, key: RequestKey) -> bool:
        """Forgets it, whatever its state. True if its blocks are held until the copy under way is reported."""
        return not self._candidates.drop(key) and self._block_table.abort(key)

    # ---- what came of plans -----------------------------------------------------------------------------------------

    def pulled(self, key: RequestKey) -> bool:
        """Its KV has arrived. True: it runs from here on; False: it was aborted meanwhile, and is gone."""
        return self._block_table.pulled(key)

    def pull_failed(self, key: RequestKey) -> None:
        self._block_table.pull_failed(key)

    def evicted(self, key: RequestKey) -> bool:
        """Its KV is in the pool, and it is gone. False if it was aborted meanwhile."""
        return self._block_table.evicted(key)

    def evict_failed(self, key: RequestKey) -> bool:
        """True: it runs again; False: it was aborted meanwhile, and is gone."""
        return self._block_table.evict_failed(key)

    def took(self, seconds: float, outside_s: float = 0.0) -> None:
        """The iteration of the last plan, and what part of it was outside the engine. Corrects what the next ones are
        foretold to take."""
        if self._estimate:
            self._estimate.took(self._predicted_s, seconds, outside_s)
        self._policy.took(seconds)

    def computed(self, key: RequestKey, count: int) -> None:
        """A part of what was pending; no token came of it."""
        self._block_table.running[key].num_cached += count

    def sampled(self, keys: Iterable[RequestKey]) -> None:
        running = self._block_table.running
        for key in keys:
            request = running[key]
            request.num_cached = request.num_tokens
            request.num_tokens += 1

    def ended(self, key: RequestKey) -> None:
        self._block_table.ended(key)

    # ---- counts -----------------------------------------------------------------------------------------------------

    @property
    def pace(self) -> float:
        """Of iterations, measured over predicted."""
        return self._estimate.pace if self._estimate else 1.0

    @property
    def num_free_blocks(self) -> int:
        return self._block_table.num_free

    @property
    def num_running(self) -> int:
        return len(self._block_table.running)

    @property
    def num_candidates(self) -> int:
        return len(self._candidates)

    def best_effort(self) -> tuple[int, int]:
        """Requests of it that run, and their blocks."""
        blocks = [request.num_blocks for request in self._block_table.running.values() if not request.is_rt]
        return len(blocks), sum(blocks)

    def lengths(self) -> list[int]:
        """Of all that run, in tokens."""
        return [request.num_tokens for request in self._block_table.running.values()]

    def work_of(self, key: RequestKey) -> Work | None:
        """Of one that is being pulled; None: it was aborted."""
        request = self._block_table.pulling.get(key)
        return request.work if request else None

    def source_of(self, key: RequestKey) -> InstanceId | None:
        """Where to pull it from; of a request in a plan's pulls."""
        return self._block_table.pulling[key].source

    def check(self) -> None:
        """Every block is held once or free."""
        self._block_table.check()

    def check_idle(self) -> None:
        self.check()
        num_left = self.num_candidates + len(self._block_table)
        if num_left:
            raise RuntimeError(f"idle, but {num_left} requests are left")
