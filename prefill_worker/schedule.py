"""What a prefill instance does at its next iteration boundary. Pure: no tensors, no clock, counts of blocks only.

Two kinds of requests share its blocks (`blocks.py`): prompts (`prompts.py`), the most urgent first (`order.py`,
`urgency.py`), and candidates of decode instances (`stages.py`). Candidates' share leaves room for the longest prompt,
so neither kind can lock the other out.

Where the discipline has deadlines, and how long iterations take can be foretold, real time (RT) and best effort (BE)
share it like this (`mixing.py`):

- **Time.** An iteration is bounded (`chunks.py`) by a share of the tightest TTFT objective that was seen lately. RT
  goes first; BE fills up an iteration in which RT runs only while that hardly takes longer.
- **Room.** BE leaves some of it free for RT, and gives its own up when RT finds none all the same (`starts.py`).
- **Trickle.** While BE is there, a credit grows, which is spent on BE before RT.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from alignedserve.estimate import Estimate
from alignedserve.messages import InstanceLimits, Work
from alignedserve.prefill_worker.blocks import Blocks
from alignedserve.prefill_worker.chunks import cut_in_order
from alignedserve.prefill_worker.members import State, num_tokens
from alignedserve.prefill_worker.mixing import Mixing
from alignedserve.prefill_worker.options import PrefillOptions
from alignedserve.prefill_worker.order import Order
from alignedserve.prefill_worker.plan import PrefillPlan
from alignedserve.prefill_worker.prompts import NothingShared, Prompts, Shares
from alignedserve.prefill_worker.stages import Stages
from alignedserve.prefill_worker.starts import Starts
from alignedserve.prefill_worker.twins import Twins
from alignedserve.types import RequestKey


class PrefillSchedule:
    def __init__(
        self,
        limits: InstanceLimits,
        staging_share: float = 0.5,
        options: PrefillOptions | None = None,
        estimate: Estimate | None = None,
        shares: Shares | None = None,
    ) -> None:
        """`staging_share`: of the blocks, for candidates; 0 where decode instances fetch from the pool themselves.

        Without an estimate there are no deadlines, only classes.
        """
        options, shares = options or PrefillOptions(), shares or NothingShared()
        discipline = options.discipline
        self._blocks = Blocks(limits)
        most_staged = limits.num_blocks - self._blocks.num_for_one
        num_staging_blocks = min(int(staging_share * limits.num_blocks), most_staged)
        self.limits = replace(
            limits, num_staging_blocks=num_staging_blocks, shares_prefixes=options.shares_prefixes
        )
        self._mixing = None
        if estimate is not None and discipline.has_deadlines:
            self._mixing = Mixing(limits, options.mix, estimate)
        self._prompts = Prompts(limits.max_num_seqs, self._blocks, shares)
        self._stages = Stages(num_staging_blocks, discipline.has_classes, self._blocks)
        self._order = Order(discipline.has_classes, self._mixing)
        twins = Twins(limits.block_size, shares, self._order)
        self._starts = Starts(self._blocks, self._prompts, self._stages, self._order, self._mixing, twins)

    def plan(self, now: float) -> PrefillPlan:
        """Takes the blocks that it plans with. What it plans fits."""
        if self._mixing:
            started, waiting = self._prompts.started.values(), self._prompts.waiting.values()
            self._mixing.look([*started, *waiting], now)
        plan = PrefillPlan(stages=self._stages.start())
        self._starts.fill(plan, now)
        plan.chunks = self._cut(now)
        return plan

    def _cut(self, now: float) -> list[tuple[RequestKey, int]]:
        members = self._order.of(self._prompts.in_state(State.COMPUTING), now)
        if self._mixing is None:
            return cut_in_order(members, self.limits.max_num_batched_tokens)
        return self._mixing.cut(members, may_fill=not self._prompts.is_rt_copied)

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
        """Their blocks are free, those under a copy once that is reported. Unknown ones are left alone."""
        for key in keys:
            self._stages.unstage(key)

    def drop_waiting(self) -> list[RequestKey]:
        """Forgets those that have no blocks. Returns the others: they are left to `abort`."""
        self._prompts.drop_waiting()
        self._stages.drop_waiting()
        return [*self._prompts.started, *self._stages.started]

    def abort(self, key: RequestKey) -> bool:
        """Forgets it, whatever its state. False if nothing is left of it.

        True: its blocks are held until the copy under way is reported by `loaded` or `staged`, or, of a prompt that
        was being computed, saved or given up, until `saved` says that none is.
        """
        is_prompt_left, is_stage_left = self._prompts.abort(key), self._stages.unstage(key)
        return is_prompt_left or is_stage_left

    def _check_new(self, work: Work, num_cached_at_most: int) -> None:
        key, count = work.request.key, num_tokens(work)
        if key in self._prompts or key in self._stages:
            raise RuntimeError(f"request {key}: ordered, but it is here already")
        if count >= self.limits.max_model_len:
            raise ValueError(
                f"request {key}: {count} tokens; at most {self.limits.max_model_len - 1} leave room for one more"
            )
        if not 0 <= work.num_cached <= num_cached_at_most:
            raise ValueError(
                f"request {key}: num_cached={work.num_cached}: must be from 0 to {num_cached_at_most}"
            )

    # ---- what came of plans -----------------------------------------------------------------------------------------

    def took(self, seconds: float, outside_s: float = 0.0) -> None:
        """The iteration of the last plan, and what part of it was outside the engine. Corrects what the next ones are
        foretold to take."""
        if self._mixing:
            self._mixing.took(seconds, outside_s)

    def loaded(self, key: RequestKey) -> bool:
        """False: it was aborted meanwhile, and is gone."""
        return self._prompts.loaded(key)

    def computed(self, key: RequestKey, count: int) -> None:
        self._prompts.computed(key, count)

    def saved(self, key: RequestKey) -> None:
        """All of its KV is in the pool; or it was aborted, and none of it is under a copy."""
        self._prompts.saved(key)

    def gave_up(self, key: RequestKey) -> None:
        """All that was computed of it is in the pool. It waits again."""
        self._prompts.gave_up(key)

    def staged(self, key: RequestKey) -> bool:
        """False: it was aborted or unstaged meanwhile, and is gone."""
        return self._stages.staged(key)

    # ---- counts -----------------------------------------------------------------------------------------------------

    @property
    def pace(self) -> float:
        """Of iterations, measured over predicted."""
        return self._mixing.estimate.pace if self._mixing else 1.0

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free

    @property
    def num_staged_blocks(self) -> int:
        return self._stages.num_blocks

    def check(self) -> None:
        """Every block is held once or free."""
        self._blocks.check(self._prompts.num_blocks + self._stages.num_blocks)
        self._prompts.check_slots()

    def check_idle(self) -> None:
        self.check()
        num_left = len(self._prompts) + len(self._stages)
        if num_left:
            raise RuntimeError(f"idle, but {num_left} requests are left")
