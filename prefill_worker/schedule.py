"""Decides what a prefill instance does at its next iteration boundary. Pure: it has no tensors and no clock, and only
counts blocks.

Two kinds of requests share its blocks (`blocks.py`): prompts (`prompts.py`), and candidates of decode instances
(`stages.py`). The candidates' share leaves blocks for the longest prompt, so neither kind can lock out the other.

The policy decides which prompts start, and how much of each is computed (`boundary.py`). The outcomes are reported to
the methods here. A prompt may wait for a running one with the same prefix (`instance/prefix_dedup.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from alignedserve.instance.prefix_dedup import PrefixDedup
from alignedserve.instance.prefix_lookup import NoPrefixCache, PrefixLookup
from alignedserve.prefill_worker.blocks import Blocks
from alignedserve.prefill_worker.boundary import Boundary
from alignedserve.prefill_worker.plan import PrefillPlan
from alignedserve.prefill_worker.prompts import Prompts
from alignedserve.prefill_worker.scheduled_request import PromptState, num_tokens
from alignedserve.prefill_worker.stages import Stages
from alignedserve.protocol.messages import InstanceLimits, Work
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import Policy, make_policy
from alignedserve.timing.estimate import Estimate
from alignedserve.types import RequestKey


class PrefillSchedule:
    def __init__(
        self,
        limits: InstanceLimits,
        staging_share: float = 0.5,
        policy: Policy | None = None,
        estimate: Estimate | None = None,
        lookup: PrefixLookup | None = None,
    ) -> None:
        """`staging_share` is the candidates' share of the blocks; 0 if decode instances pull from the pool themselves.
        `estimate` predicts the duration of iterations; None if nothing does. `lookup` finds KV that prompts may share;
        None if they share none."""
        self._blocks = Blocks(limits)
        most_staged = limits.num_blocks - self._blocks.num_for_one
        num_staging_blocks = min(int(staging_share * limits.num_blocks), most_staged)
        self.limits = replace(
            limits, num_staging_blocks=num_staging_blocks, enable_prefix_caching=lookup is not None
        )
        lookup = lookup or NoPrefixCache()
        self._policy = (policy or make_policy(SchedulingConfig())).prefill(limits, estimate)
        self._estimate = estimate
        self._prompts = Prompts(limits.max_num_seqs, self._blocks, lookup)
        self._stages = Stages(num_staging_blocks, self._policy, self._blocks)
        self._dedup = PrefixDedup(limits.block_size, lookup, self._policy.is_ahead)
        self._boundary = Boundary(limits, self._blocks, self._prompts, self._stages, self._dedup)
        # Predicted seconds of the last planned iteration.
        self._predicted_s = 0.0

    def plan(self, now: float) -> PrefillPlan:
        """Plans the next iteration, and allocates the blocks that it needs. The plan always fits."""
        at = self._boundary
        self._prompts.see_new(now)
        at.begin(now, stages=self._stages.start())
        self._dedup.look(self._policy.in_order(self._prompts.in_state(PromptState.COMPUTING), now), now)
        self._policy.plan(at)
        if self._estimate and at.computed:
            self._predicted_s = self._estimate.iteration(at.computed, [])
        return at.plan

    # ---- orders -----------------------------------------------------------------------------------------------------

    def prefill(self, works: Iterable[Work]) -> None:
        for work in works:
            self._check_new(work, num_cached_at_most=num_tokens(work) - 1)
            self._prompts.add(work)

    def stage(self, works: Iterable[Work]) -> None:
        for work in works:
            self._check_new(work, num_cached_at_most=num_tokens(work))
            self._stages.add(work)

    def unstage(self, keys: Iterable[RequestKey]) -> None:
        """Frees the candidates' blocks; those under a copy when that is reported. Ignores unknown requests."""
        for key in keys:
            self._stages.unstage(key)

    def drop_waiting(self) -> list[RequestKey]:
        """Forgets the requests without blocks. Returns the others, which the caller must abort."""
        self._prompts.drop_waiting()
        self._stages.drop_waiting()
        return [*self._prompts.started, *self._stages.started]

    def abort(self, key: RequestKey) -> bool:
        """Forgets the request in any state. Returns False if nothing is left of it.

        Returns True if its blocks are still held: a candidate's until `staged` reports the running copy, a prompt's
        until `loaded` or `saved` reports that no copy is running.
        """
        is_prompt_left, is_stage_left = self._prompts.abort(key), self._stages.unstage(key)
        return is_prompt_left or is_stage_left

    def _check_new(self, work: Work, num_cached_at_most: int) -> None:
        key, count = work.request.key, num_tokens(work)
        if key in self._prompts or key in self._stages:
            raise RuntimeError(f"request {key}: ordered, but it is here already")
        most = self.limits.max_model_len - (not work.request.is_embedding)
        if count > most:
            raise ValueError(f"request {key}: {count} tokens; at most {most} leave room for what is wanted")
        if not 0 <= work.num_cached <= num_cached_at_most:
            raise ValueError(
                f"request {key}: num_cached={work.num_cached}: must be from 0 to {num_cached_at_most}"
            )

    # ---- what came of plans -----------------------------------------------------------------------------------------

    def took(self, seconds: float, outside_s: float = 0.0) -> None:
        """Reports the duration of the last plan's iteration, and its seconds outside the engine. This corrects later
        predictions."""
        if self._estimate:
            self._estimate.took(self._predicted_s, seconds, outside_s)

    def loaded(self, key: RequestKey) -> bool:
        """Reports that the prompt's cached KV has arrived. Returns False if it was aborted meanwhile and is gone."""
        return self._prompts.loaded(key)

    def computed(self, key: RequestKey, count: int) -> None:
        self._prompts.computed(key, count)

    def hold(self, key: RequestKey) -> bool:
        """Lets decode instances pull this computed prompt's KV until `let_go`. Returns False and changes nothing if
        that would leave too few blocks for other prompts."""
        request = self._prompts.started[key]
        may_hold = self._stages.has_share(request.num_blocks)
        if may_hold:
            self._prompts.hold(request)
        return may_hold

    def let_go(self, key: RequestKey) -> None:
        """Ends `hold`: no decode instance pulls the prompt now or later."""
        self._prompts.let_go(key)

    def saved(self, key: RequestKey) -> None:
        """Reports that all KV of the prompt is in the pool; or that an aborted prompt is not held and has no copy
        running."""
        self._prompts.saved(key)

    def preempted(self, key: RequestKey) -> None:
        """Reports that the prompt's computed KV is in the pool. The prompt waits again."""
        self._prompts.preempted(key)

    def staged(self, key: RequestKey) -> bool:
        """Reports that the candidate's KV has arrived. Returns False if it was aborted or unstaged meanwhile and is
        gone."""
        return self._stages.staged(key)

    # ---- counts -----------------------------------------------------------------------------------------------------

    @property
    def pace(self) -> float:
        """Ratio of measured to predicted time of recent iterations."""
        return self._estimate.pace if self._estimate else 1.0

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free

    @property
    def num_staged_blocks(self) -> int:
        return self._stages.num_blocks

    @property
    def num_held_blocks(self) -> int:
        """Blocks of prompts that decode instances may pull."""
        return self._blocks.num_held

    def check(self) -> None:
        """Raises unless every block is either held once or free."""
        self._blocks.check(self._prompts.num_blocks + self._stages.num_blocks)
        self._prompts.check_slots()
        self._prompts.check_held()

    def check_idle(self) -> None:
        self.check()
        num_left = len(self._prompts) + len(self._stages)
        if num_left:
            raise RuntimeError(f"idle, but {num_left} requests are left")
