"""Decides what a decode instance does at its next iteration boundary. Pure: it has no tensors and no clock, and only
counts blocks.

The state is the running batch R, the candidate requests Q (which may join R), the candidate batch B (which runs next),
and the blocks of each request (`candidates.py`, `block_table.py`). After each iteration the policy decides which
requests leave, join and run (`boundary.py`). The outcomes are reported to the methods here.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

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
        max_parts: int = 0,
    ) -> None:
        """`estimate` predicts the duration of iterations; None if nothing does. `lookup` finds KV that prompts may
        share; None if they share none. `max_parts` is the number of blocks for which host memory has room for
        overwritten KV; 0 if blocks are not shared from both ends (`shared_ends.py`)."""
        self.limits = replace(limits, enable_prefix_caching=lookup is not None)
        lookup = lookup or NoPrefixCache()
        self._policy = policy
        self._estimate = estimate
        self._candidates, self._block_table = (
            Candidates(limits.max_model_len, lookup),
            BlockTable(limits, max_parts),
        )
        self._dedup = PrefixDedup(limits.block_size, lookup, policy.is_ahead)
        self._boundary = Boundary(limits, self._candidates, self._block_table, lookup, self._dedup)
        # Predicted seconds of the last planned iteration.
        self._predicted_s = 0.0
        # When the last iteration was planned.
        self._planned_s = 0.0

    def plan(self, now: float) -> DecodePlan:
        """Plans the next iteration, and allocates the blocks that it needs. The plan always fits."""
        at = self._boundary
        self._planned_s = now
        at.begin(now)
        at.plan.passing = self._block_table.free_passed()
        if self.limits.enable_prefix_caching:
            self._dedup.look(self._policy.in_order(self._block_table.computing, now), now)
        self._policy.plan(at)
        if self._estimate and at.plan.goes_on:
            self._predicted_s = self._estimate.iteration(at.chunks, at.lengths, at.num_restored)
        return at.plan

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
            self._candidates.first_batch_to_stay = batch
        for work in works:
            key = work.request.key
            if key in self._candidates or key in self._block_table:
                raise RuntimeError(f"request {key}: offered, but it is here already")
            self._candidates.add(work, is_batch, batch, source)

    def expect(self, num_prefilling: int, num_ready: int, now: float) -> None:
        """Announces that RT will soon be offered: the numbers of its prompts that are being computed and that are
        complete."""
        self._policy.expect(num_prefilling, num_ready, now)

    def drop_candidates(self) -> list[RequestKey]:
        """Forgets all candidates. Returns the requests that are being pulled, which the caller must abort."""
        self._candidates.clear()
        return list(self._block_table.pulling)

    def evict(self, key: RequestKey) -> bool:
        """Stops running the request. Its blocks are held until `evicted`. Returns False and changes nothing if it is
        not running. If blocks are shared from both ends, BE keeps only `num_cached_of` tokens and their blocks."""
        return self._block_table.evict(key)

    def num_cached_of(self, key: RequestKey) -> int:
        """Returns the number of tokens of a leaving request with KV."""
        return self._block_table.leaving[key].num_cached

    def abort(self, key: RequestKey) -> bool:
        """Forgets the request in any state. Returns True if its blocks are held until a running copy is reported."""
        return not self._candidates.drop(key) and self._block_table.abort(key)

    # ---- what came of plans -----------------------------------------------------------------------------------------

    def pulled(self, key: RequestKey) -> bool:
        """Reports that the request's KV has arrived. Returns True if it now runs, False if it was aborted meanwhile and
        is gone."""
        return self._block_table.pulled(key)

    def pull_failed(self, key: RequestKey) -> None:
        self._block_table.pull_failed(key)

    def evicted(self, key: RequestKey) -> bool:
        """Reports that the request's KV is in the pool and the request is gone. Returns False if it was aborted
        meanwhile."""
        return self._block_table.evicted(key)

    def evict_failed(self, key: RequestKey) -> bool:
        """Returns True if the request runs again, False if it was aborted meanwhile and is gone."""
        return self._block_table.evict_failed(key)

    def took(self, seconds: float, outside_s: float = 0.0) -> None:
        """Reports the duration of the last plan's iteration, and its seconds outside the engine. This corrects later
        predictions."""
        if self._estimate:
            self._estimate.took(self._predicted_s, seconds, outside_s)
        self._policy.took(seconds)

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """Reports a copy from the pool, which corrects later predictions."""
        if self._estimate:
            self._estimate.fetched(num_bytes, seconds)

    def computed(self, key: RequestKey, count: int) -> None:
        """Reports that `count` pending tokens were computed, without sampling a token."""
        self._block_table.running[key].num_cached += count

    def sampled(self, keys: Iterable[RequestKey]) -> None:
        running = self._block_table.running
        for key in keys:
            request = running[key]
            request.num_cached = request.num_tokens
            request.num_tokens += 1
            if request.num_tokens == request.num_prompt + 1:
                request.first_s = self._planned_s

    def ended(self, key: RequestKey) -> None:
        self._block_table.ended(key)

    # ---- counts -----------------------------------------------------------------------------------------------------

    @property
    def pace(self) -> float:
        """Ratio of measured to predicted time of recent iterations."""
        return self._estimate.pace if self._estimate else 1.0

    @property
    def last_overrun(self) -> float:
        return self._estimate.last_overrun if self._estimate else 1.0

    @property
    def outside_s(self) -> float:
        """Recent seconds per iteration in which the engine computes nothing."""
        return self._estimate.outside_s if self._estimate else 0.0

    @property
    def num_free_blocks(self) -> int:
        return self._block_table.num_free

    @property
    def num_running(self) -> int:
        return len(self._block_table.running)

    @property
    def num_here(self) -> int:
        """The number of requests that hold blocks, including those under copies."""
        return len(self._block_table)

    @property
    def num_candidates(self) -> int:
        return len(self._candidates)

    def best_effort(self) -> tuple[int, int]:
        """Returns the numbers of running BE requests and of their blocks."""
        blocks = [request.num_blocks for request in self._block_table.running.values() if not request.is_rt]
        return len(blocks), sum(blocks)

    @property
    def running_batch(self) -> int:
        """The number of the running batch: see DecodeReport."""
        return self._candidates.running_batch

    def lengths(self) -> list[int]:
        """Returns the lengths of all running requests, in tokens."""
        return [request.num_tokens for request in self._block_table.running.values()]

    def is_mixed(self, plan: DecodePlan) -> bool:
        """Returns whether the plan runs requests of several batches, or of a batch and of none."""
        if not self.running_batch:
            return False
        running = self._block_table.running
        keys = chain(plan.run, (key for key, _ in plan.chunks))
        return len({running[key].batch for key in keys}) > 1

    def batch_lengths(self) -> list[int]:
        """Returns the lengths of those running requests that belong to the running batch, in tokens."""
        number = self.running_batch
        return [each.num_tokens for each in self._block_table.running.values() if each.batch == number]

    def work_of(self, key: RequestKey) -> Work | None:
        """Returns the work of a request that is being pulled; None if it was aborted."""
        request = self._block_table.pulling.get(key)
        return request.work if request else None

    def source_of(self, key: RequestKey) -> InstanceId | None:
        """Returns the instance from which a request in a plan's pulls is pulled; None for the pool."""
        return self._block_table.pulling[key].source

    def check(self) -> None:
        """Raises unless every block is either held once or free."""
        self._block_table.check()

    def check_idle(self) -> None:
        self.check()
        num_left = self.num_candidates + len(self._block_table) + self._block_table.ends.num_left
        if num_left:
            raise RuntimeError(f"idle, but {num_left} requests are left")
