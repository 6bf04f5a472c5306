"""Which prompts start, and which of best effort (BE) give up their blocks for real time (RT); who exactly says
`room.py`. Pure.

BE starts only while some blocks and a slot stay free for RT. If RT finds none all the same, BE prompts give up their
blocks: what was computed is in the pool, and is not computed again.

Who begins like one under way may wait for that (`twins.py`), and keeps nobody from starting meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alignedserve.prefill_worker.blocks import Blocks
from alignedserve.prefill_worker.members import Member, State
from alignedserve.prefill_worker.mixing import Mixing
from alignedserve.prefill_worker.order import Order
from alignedserve.prefill_worker.plan import PrefillPlan
from alignedserve.prefill_worker.prompts import Prompts
from alignedserve.prefill_worker.room import victims
from alignedserve.prefill_worker.stages import Stages
from alignedserve.prefill_worker.twins import Twins

# with so many blocks
MayStart = Callable[[int], bool]


class Starts:
    def __init__(
        self,
        blocks: Blocks,
        prompts: Prompts,
        stages: Stages,
        order: Order,
        mixing: Mixing | None,
        twins: Twins,
    ) -> None:
        self._blocks = blocks
        self._prompts = prompts
        self._stages = stages
        self._order = order
        self._mixing = mixing
        self._twins = twins

    def fill(self, plan: PrefillPlan, now: float) -> None:
        waiting = self._order.of(self._prompts.waiting.values(), now)
        self._twins.look(self._order.of(self._prompts.in_state(State.COMPUTING), now), now)
        if self._mixing:
            self._start_mixed(self._mixing, waiting, plan, now)
        elif self._stages.short_of_blocks() is None:
            self._start_while(waiting, plan, self._fits)

    def _start_mixed(self, mixing: Mixing, waiting: Sequence[Member], plan: PrefillPlan, now: float) -> None:
        first = self._stages.short_of_blocks()
        be = [member for member in waiting if not member.is_rt]
        owed = be[:1] if mixing.is_owed and not self._prompts.is_be_started else []
        urgent = owed + [member for member in waiting if member.is_rt]
        if first is None or not first.is_rt:
            self._start_while(urgent, plan, self._fits)
        lacking = next((member for member in urgent if self._wants_to_start(member)), None)
        if first is None and lacking is None:
            self._start_while(be, plan, self._leaves_headroom)
        wanted = first if first is not None and first.is_rt else lacking
        if wanted is not None and wanted.is_rt:
            self._make_room(mixing, wanted, plan, now)

    def _start_while(self, members: Sequence[Member], plan: PrefillPlan, may_start: MayStart) -> None:
        for member in members:
            if not self._wants_to_start(member):
                continue
            if not may_start(self._blocks.needed(member.num_tokens)):
                break
            self._prompts.start(member)
            self._twins.started(member)
            plan.starts.append(member.work)
            if member.work.num_cached:
                plan.loads.append(member.work)

    def _wants_to_start(self, member: Member) -> bool:
        return member.state is State.WAITING and not self._twins.had_better_wait(member)

    def _fits(self, num_blocks: int) -> bool:
        return num_blocks <= self._blocks.num_free and self._prompts.num_free_slots > 0

    def _leaves_headroom(self, num_blocks: int) -> bool:
        """Best effort that is alone may take all: it can give it up."""
        assert self._mixing
        if not self._prompts.is_be_started:
            return self._fits(num_blocks)
        return self._fits(num_blocks + self._mixing.num_headroom_blocks) and self._prompts.num_free_slots > 1

    def _make_room(self, mixing: Mixing, wanted: Member, plan: PrefillPlan, now: float) -> None:
        """For one of real time, at the cost of best effort, if that is of use."""
        prompts = self._prompts
        is_prompt = wanted.key in prompts.waiting
        missing = self._blocks.needed(wanted.num_tokens if is_prompt else wanted.work.num_cached)
        missing -= self._blocks.num_free
        missing -= sum(each.num_blocks for each in prompts.in_state(State.GIVING_UP))
        needs_slot = is_prompt and prompts.num_free_slots <= 0
        be = [each for each in prompts.in_state(State.COMPUTING) if not each.is_rt]
        for victim in victims(self._order.of(be, now)[mixing.is_owed :], missing, needs_slot):
            prompts.give_up(victim)
            plan.gives_up.append(victim.key)
