"""Decides what a prefill instance does at its next iteration boundary. Pure: it has no tensors and no clock.

Two kinds of requests share its blocks (`instance/memory.py`): prompts (`prompt_table.py`), and candidates of decode
instances (`stages.py`). The candidates' share leaves blocks for the longest prompt, so neither kind can lock out the
other.

The policy decides which prompts start, and how much of each is computed (`boundary.py`). The outcomes are reported to
`prompts` and `stages`. A prompt may wait for a running one with the same prefix (`instance/prefix_dedup.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from msgspec.structs import replace

from alignedserve.instance.iteration_times import IterationForecast
from alignedserve.instance.memory import BlockManager
from alignedserve.instance.owners import IterationLength
from alignedserve.instance.prefix_cache import PrefixCache
from alignedserve.instance.prefix_dedup import PrefixDedup
from alignedserve.prefill_worker.boundary import Boundary, PrefillPlan
from alignedserve.prefill_worker.prompt_table import PromptTable
from alignedserve.prefill_worker.scheduled_request import PromptState, num_tokens
from alignedserve.prefill_worker.stages import Stages
from alignedserve.protocol.messages import InstanceLimits, Work
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import Policy, make_policy
from alignedserve.timing.cost import IterationLoad
from alignedserve.timing.estimate import Estimate
from alignedserve.types import RequestKey


class PrefillSchedule:
    def __init__(
        self,
        limits: InstanceLimits,
        staging_share: float = 0.5,
        policy: Policy | None = None,
        estimate: Estimate | None = None,
        memory: BlockManager | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        """`staging_share` is the candidates' share of the blocks; 0 if decode instances pull from the pool themselves.
        `estimate` predicts the duration of iterations; None if nothing does. `memory` has the instance's blocks, all
        free; `prefix_cache` finds those that prompts may share."""
        # A prompt's blocks must all be saved to the pool. So it gets all of them at the start, and passes none.
        self.memory = memory or BlockManager(limits.num_blocks, dataclasses.replace(limits.span, max_step=0))
        prefix_cache = prefix_cache or PrefixCache(self.memory, is_enabled=False)
        num_for_one = self.memory.span.num_held(0, limits.max_model_len)
        if limits.num_blocks < num_for_one:
            raise ValueError(
                f"num_blocks={limits.num_blocks}: a request of max_model_len={limits.max_model_len} "
                f"needs {num_for_one}"
            )
        most_staged = limits.num_blocks - num_for_one
        num_staging_blocks = min(int(staging_share * limits.num_blocks), most_staged)
        self.limits = replace(
            limits, num_staging_blocks=num_staging_blocks, enable_prefix_caching=prefix_cache.is_enabled
        )
        self.policy = (policy or make_policy(SchedulingConfig())).prefill(limits, estimate)
        self.forecast = IterationForecast(estimate)
        self.prompts = PromptTable(limits.max_num_seqs, self.memory, prefix_cache)
        self.stages = Stages(num_staging_blocks, self.policy, self.memory, self.prompts)
        self._dedup = PrefixDedup(limits.block_size, prefix_cache, self.policy.is_ahead)
        self._length = IterationLength(limits, estimate)
        self._boundary = Boundary(limits, self.memory, self.prompts, self.stages, self._dedup)

    def plan(self, now: float) -> PrefillPlan:
        """Plans the next iteration, and allocates the blocks that it needs. The plan always fits."""
        at = self._boundary
        self.prompts.see_new(now)
        computing = self.prompts.in_state(PromptState.COMPUTING)
        furthest = max((each.num_computed for each in computing), default=0)
        most = self._length.most_tokens(self.prompts.num_missing, furthest, now)
        at.begin(now, self.stages.start(), most)
        self._dedup.look(self.policy.in_order(computing, now), now)
        self.policy.plan(at)
        self.memory.settle()
        if at.computed:
            self.forecast.plan(IterationLoad(at.computed))
        return at.plan

    # ---- orders -----------------------------------------------------------------------------------------------------

    def prefill(self, works: Iterable[Work]) -> None:
        for work in works:
            self._check_new(work, num_cached_at_most=num_tokens(work) - 1)
            self.prompts.add(work)

    def stage(self, works: Iterable[Work]) -> None:
        for work in works:
            self._check_new(work, num_cached_at_most=num_tokens(work))
            self.stages.add(work)

    def drop_waiting(self) -> list[RequestKey]:
        """Forgets the requests without blocks. Returns the others, which the caller must abort."""
        self.prompts.drop_waiting()
        self.stages.drop_waiting()
        return [*self.prompts.started, *self.stages.started]

    def abort(self, key: RequestKey) -> bool:
        """Forgets the request in any state. Returns False if nothing is left of it.

        Returns True if its blocks are still held: a candidate's until `staged` reports the running copy, a prompt's
        until `loaded` or `saved` reports that no copy is running.
        """
        is_prompt_left, is_stage_left = self.prompts.abort(key), self.stages.unstage(key)
        return is_prompt_left or is_stage_left

    def _check_new(self, work: Work, num_cached_at_most: int) -> None:
        key, count = work.request.key, num_tokens(work)
        if key in self.prompts or key in self.stages:
            raise RuntimeError(f"request {key}: ordered, but it is here already")
        most = self.limits.max_model_len - (not work.request.is_embedding)
        if count > most:
            raise ValueError(f"request {key}: {count} tokens; at most {most} leave room for what is wanted")
        if not 0 <= work.num_cached <= num_cached_at_most:
            raise ValueError(
                f"request {key}: num_cached={work.num_cached}: must be from 0 to {num_cached_at_most}"
            )

    def hold(self, key: RequestKey) -> bool:
        """Lets decode instances pull this computed prompt's KV until `let_go`. Returns False and changes nothing if
        that would leave too few blocks for other prompts."""
        request = self.prompts.started[key]
        request.is_held = self.stages.has_share(request.num_blocks)
        return request.is_held

    def check(self) -> None:
        """Raises unless every block is either held by its requests or free."""
        self.memory.check_owners([*self.prompts.started.values(), *self.stages.started.values()])
        self.prompts.check_slots()

    def check_idle(self) -> None:
        self.check()
        num_left = len(self.prompts) + len(self.stages)
        if num_left:
            raise RuntimeError(f"idle, but {num_left} requests are left")
