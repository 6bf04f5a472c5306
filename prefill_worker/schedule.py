"""What a prefill instance does at its next iteration boundary. Pure: no tensors, no clock, counts of blocks only.

Two kinds of requests share its blocks. Prompts, the most urgent first (`urgency.py`):

    waiting -> loading (if the pool has some of its KV) -> computing, chunk by chunk -> saving -> gone
       '------------------ giving up <-----------------------'

A prompt gets blocks for all of its tokens when it starts, and holds them until all of its KV is in the pool. And
candidates of decode instances, from where those pull them:

    waiting -> staging (KV on its way from the pool) -> staged -> gone, when they are unstaged

Candidates have a share of the blocks, and within it they come first: a decode instance waits for them. The share
leaves room for the longest prompt, so neither kind can lock the other out.

Where the discipline has deadlines, and how long iterations take can be foretold, real time (RT) and best effort (BE)
share it like this:

- **Time.** An iteration is bounded (`chunks.py`) by a share of the tightest TTFT objective that was seen lately. RT
  goes first; BE fills up an iteration in which RT runs only while that hardly takes longer.
- **Room.** BE starts only while some blocks and a slot stay free for RT. If RT finds none all the same, BE prompts give
  up their blocks (`room.py`): what was computed is in the pool, and is not computed again.
- **Trickle.** While BE is there, a credit grows (`trickle.py`), which is spent on BE before RT.

Abort takes a request from anywhere. Blocks under a copy are held until the copy is reported, whatever became of the
request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from alignedserve.estimate import Estimate
from alignedserve.messages import InstanceLimits, Work
from alignedserve.types import RequestKey
from prefill_worker.chunks import cut_in_order
from prefill_worker.members import Member, State, num_tokens
from prefill_worker.mixing import Mixing
from prefill_worker.options import PrefillOptions
from prefill_worker.room import victims


@dataclass
class PrefillPlan:
    # these prompts save what was computed and leave their blocks; `gave_up` follows, when no copy is under way.
    # Carried out before the rest.
    gives_up: list[RequestKey] = field(default_factory=list)
    # these prompts start: all of their blocks are taken
    starts: list[Work] = field(default_factory=list)
    # of those, start to copy cached KV from the pool; `loaded` follows (after `abort`, when that failed)
    loads: list[Work] = field(default_factory=list)
    # start to copy these candidates' KV from the pool; `staged` follows (after `abort`, when that failed)
    stages: list[Work] = field(default_factory=list)
    # how many tokens of whom to compute, the most urgent first; `computed` follows
    chunks: list[tuple[RequestKey, int]] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """The next plan need not wait for anything."""
        return bool(self.chunks or self.gives_up)


Members = dict[RequestKey, Member]
# with so many blocks
MayStart = Callable[[int], bool]


class PrefillSchedule:
    def __init__(
        self,
        limits: InstanceLimits,
        staging_share: float = 0.5,
        options: PrefillOptions | None = None,
        estimate: Estimate | None = None,
    ) -> None:
        """`staging_share`: of the blocks, for candidates; 0 where decode instances fetch from the pool themselves.

        Without an estimate there are no deadlines, only classes.
        """
        needed = -(-limits.max_model_len // limits.block_size)
        if limits.num_blocks < needed:
            raise ValueError(
                f"num_blocks={limits.num_blocks}: a request of max_model_len={limits.max_model_len} needs {needed}"
            )
        num_staging_blocks = min(int(staging_share * limits.num_blocks), limits.num_blocks - needed)
        self.limits = replace(limits, num_staging_blocks=num_staging_blocks)
        options = options or PrefillOptions()
        self._discipline = options.discipline
        self._mixing = (
            Mixing(limits, options.mix, estimate)
            if estimate is not None and self._discipline.has_deadlines
            else None
        )
        self._num_free = limits.num_blocks
        # not started, no blocks; in the order in which they came
        self._prompts_waiting: Members = {}
        self._stages_waiting: Members = {}
        # started; likewise
        self._prompts: Members = {}
        self._stages: Members = {}

    # ---- orders -----------------------------------------------------------------------------------------------------

    def prefill(self, works: Iterable[Work]) -> None:
        for work in works:
            self._check_new(work, num_cached_at_most=num_tokens(work) - 1)
            self._prompts_waiting[work.request.key] = Member(work, num_tokens(work) - work.num_cached)

    def stage(self, works: Iterable[Work]) -> None:
        for work in works:
            self._check_new(work, num_cached_at_most=num_tokens(work))
            needed, most = self._blocks_for(work.num_cached), self.limits.num_staging_blocks
            if needed > most:
                raise ValueError(
                    f"request {work.request.key}: {needed} blocks to stage, at most {most} are for that"
                )
            self._stages_waiting[work.request.key] = Member(work)

    def unstage(self, keys: Iterable[RequestKey]) -> None:
        """Their blocks are free, those under a copy once that is reported. Unknown ones are left alone."""
        for key in keys:
            self._stages_waiting.pop(key, None)
            member = self._stages.get(key)
            if member and member.state is State.STAGED:
                self._free(self._stages.pop(key))
            elif member:
                member.state = State.DYING

    def drop_waiting(self) -> list[RequestKey]:
        """Forgets those that have no blocks. Returns the others: they are left to `abort`."""
        self._prompts_waiting.clear()
        self._stages_waiting.clear()
        return [key for members in self._holders for key in members]

    def abort(self, key: RequestKey) -> bool:
        """Forgets it, whatever its state. False if nothing is left of it.

        True: its blocks are held until the copy under way is reported by `loaded` or `staged`, or, of a prompt that
        was being computed, saved or given up, until `saved` says that none is.
        """
        self._prompts_waiting.pop(key, None)
        self.unstage([key])
        if key in self._prompts:
            self._prompts[key].state = State.DYING
        return key in self._prompts or key in self._stages

    # ---- what came of plans -----------------------------------------------------------------------------------------

    def took(self, seconds: float, outside_s: float = 0.0) -> None:
        """The iteration of the last plan, and what part of it was outside the engine. Corrects what the next ones are
        foretold to take."""
        if self._mixing:
            self._mixing.took(seconds, outside_s)

    def loaded(self, key: RequestKey) -> bool:
        """False: it was aborted meanwhile, and is gone."""
        if self._bury(self._prompts, key):
            return False
        self._prompts[key].state = State.COMPUTING
        return True

    def computed(self, key: RequestKey, count: int) -> None:
        member = self._prompts[key]
        member.num_pending -= count
        if member.num_pending == 0:
            member.state = State.SAVING

    def saved(self, key: RequestKey) -> None:
        """All of its KV is in the pool; or it was aborted, and none of it is under a copy."""
        state = self._prompts[key].state
        if state not in (State.SAVING, State.DYING):
            raise RuntimeError(f"request {key}: saved, but it is {state.name}")
        self._free(self._prompts.pop(key))

    def gave_up(self, key: RequestKey) -> None:
        """All that was computed of it is in the pool. It waits again."""
        member = self._prompts[key]
        if member.state is not State.GIVING_UP:
            raise RuntimeError(f"request {key}: gave its blocks up, but it is {member.state.name}")
        self._free(self._prompts.pop(key))
        member.give_up()
        self._prompts_waiting[key] = member

    def staged(self, key: RequestKey) -> bool:
        """False: it was aborted or unstaged meanwhile, and is gone."""
        if self._bury(self._stages, key):
            return False
        self._stages[key].state = State.STAGED
        return True

    # ---- counts -----------------------------------------------------------------------------------------------------

    @property
    def pace(self) -> float:
        """Of iterations, measured over predicted."""
        return self._mixing.estimate.pace if self._mixing else 1.0

    @property
    def num_free_blocks(self) -> int:
        return self._num_free

    @property
    def num_staged_blocks(self) -> int:
        return sum(member.num_blocks for member in self._stages.values())

    def check(self) -> None:
        """Every block is held once or free."""
        num_held = sum(member.num_blocks for members in self._holders for member in members.values())
        if num_held + self._num_free != self.limits.num_blocks:
            raise RuntimeError(
                f"blocks leaked: {num_held} held + {self._num_free} free != {self.limits.num_blocks} in all"
            )

    def check_idle(self) -> None:
        self.check()
        num_left = len(self._prompts_waiting) + len(self._stages_waiting) + sum(map(len, self._holders))
        if num_left:
            raise RuntimeError(f"idle, but {num_left} requests are left")

    # ---- planning ---------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> PrefillPlan:
        """Takes the blocks that it plans with. What it plans fits."""
        plan = PrefillPlan()
        if self._mixing:
            self._mixing.look([*self._prompts.values(), *self._prompts_waiting.values()], now)
        self._start_stages(plan)
        self._start_prompts(plan, now)
        members = self._in_order(
            [member for member in self._prompts.values() if member.state is State.COMPUTING], now
        )
        if self._mixing is None:
            plan.chunks = cut_in_order(members, self.limits.max_num_batched_tokens)
        else:
            plan.chunks = self._mixing.cut(members, may_fill=not self._is_rt_copied)
        return plan

    def _in_order(self, members: Iterable[Member], now: float) -> list[Member]:
        """The most urgent first; those that came first among equals."""
        mixing = self._mixing
        if mixing:
            return sorted(members, key=lambda member: mixing.order(member, now))
        if self._discipline.has_classes:
            return sorted(members, key=lambda member: not member.is_rt)
        return list(members)

    # ---- candidates ----

    def _stages_in_order(self) -> list[Member]:
        members = self._stages_waiting.values()
        return sorted(members, key=lambda member: self._discipline.has_classes and not member.is_rt)

    def _start_stages(self, plan: PrefillPlan) -> None:
        for member in self._stages_in_order():
            num_blocks = self._blocks_for(member.work.num_cached)
            if num_blocks > self._num_free or not self._has_share(num_blocks):
                break
            self._hold(self._stages_waiting, self._stages, member, num_blocks, State.STAGING)
            plan.stages.append(member.work)

    def _has_share(self, num_blocks: int) -> bool:
        return self.num_staged_blocks + num_blocks <= self.limits.num_staging_blocks

    def _stage_short_of_blocks(self) -> Member | None:
        """A candidate that waits for blocks rather than for others' end: what becomes free is for it then, not for new
        prompts."""
        member = next(iter(self._stages_in_order()), None)
        return member if member and self._has_share(self._blocks_for(member.work.num_cached)) else None

    # ---- prompts ----

    @property
    def _is_rt_copied(self) -> bool:
        """It goes on when the copy has ended: then it should not find a chunk of best effort under way, whose end it
        would have to wait for."""
        copied = (State.LOADING, State.SAVING)
        if any(each.state in copied and each.is_rt for each in self._prompts.values()):
            return True
        is_waiting = any(each.is_rt for each in self._prompts_waiting.values())
        return is_waiting and any(each.state is State.GIVING_UP for each in self._prompts.values())

    def _start_prompts(self, plan: PrefillPlan, now: float) -> None:
        waiting = self._in_order(self._prompts_waiting.values(), now)
        first = self._stage_short_of_blocks()
        if self._mixing is None:
            if first is None:
                self._start_while(waiting, plan, self._fits)
            return
        be = [member for member in waiting if not member.is_rt]
        owed = be[:1] if self._mixing.is_owed and not self._is_be_started else []
        urgent = owed + [member for member in waiting if member.is_rt]
        if first is None or not first.is_rt:
            self._start_while(urgent, plan, self._fits)
        lacking = next((member for member in urgent if member.state is State.WAITING), None)
        if first is None and lacking is None:
            self._start_while(be, plan, self._leaves_headroom)
        wanted = first if first is not None and first.is_rt else lacking
        if wanted is not None and wanted.is_rt:
            self._make_room(wanted, plan, now)

    def _start_while(self, members: Sequence[Member], plan: PrefillPlan, may_start: MayStart) -> None:
        for member in members:
            num_blocks = self._blocks_for(member.num_tokens)
            if member.state is not State.WAITING:
                continue
            if not may_start(num_blocks):
                break
            state = State.LOADING if member.work.num_cached else State.COMPUTING
            self._hold(self._prompts_waiting, self._prompts, member, num_blocks, state)
            plan.starts.append(member.work)
            if member.work.num_cached:
                plan.loads.append(member.work)

    def _fits(self, num_blocks: int) -> bool:
        return num_blocks <= self._num_free and self._num_free_slots > 0

    def _leaves_headroom(self, num_blocks: int) -> bool:
        """Best effort that is alone may take all: it can give it up."""
        assert self._mixing
        if not self._is_be_started:
            return self._fits(num_blocks)
        return self._fits(num_blocks + self._mixing.num_headroom_blocks) and self._num_free_slots > 1

    @property
    def _is_be_started(self) -> bool:
        return any(member.has_slot and not member.is_rt for member in self._prompts.values())

    @property
    def _num_free_slots(self) -> int:
        return self.limits.max_num_seqs - sum(member.has_slot for member in self._prompts.values())

    def _make_room(self, wanted: Member, plan: PrefillPlan, now: float) -> None:
        """For one of real time, at the cost of best effort, if that is of use."""
        assert self._mixing
        is_prompt = wanted.key in self._prompts_waiting
        missing = self._blocks_for(wanted.num_tokens if is_prompt else wanted.work.num_cached)
        missing -= self._num_free
        missing -= sum(each.num_blocks for each in self._prompts.values() if each.state is State.GIVING_UP)
        needs_slot = is_prompt and self._num_free_slots <= 0
        computing = [each for each in self._prompts.values() if each.state is State.COMPUTING]
        in_order = self._in_order((each for each in computing if not each.is_rt), now)
        for victim in victims(in_order[self._mixing.is_owed :], missing, needs_slot):
            victim.state = State.GIVING_UP
            plan.gives_up.append(victim.key)

    # ---- blocks -----------------------------------------------------------------------------------------------------

    @property
    def _holders(self) -> tuple[Members, Members]:
        return self._prompts, self._stages

    def _hold(
        self, waiting: Members, members: Members, member: Member, num_blocks: int, state: State
    ) -> None:
        members[member.key] = waiting.pop(member.key)
        member.num_blocks, member.state = num_blocks, state
        self._num_free -= num_blocks

    def _free(self, member: Member) -> None:
        self._num_free += member.num_blocks

    def _bury(self, members: Members, key: RequestKey) -> bool:
        is_dying = members[key].state is State.DYING
        if is_dying:
            self._free(members.pop(key))
        return is_dying

    def _check_new(self, work: Work, num_cached_at_most: int) -> None:
        key, count = work.request.key, num_tokens(work)
        waiting = (self._prompts_waiting, self._stages_waiting)
        if any(key in members for members in (*waiting, *self._holders)):
            raise RuntimeError(f"request {key}: ordered, but it is here already")
        if count >= self.limits.max_model_len:
            raise ValueError(
                f"request {key}: {count} tokens; at most {self.limits.max_model_len - 1} leave room for one more"
            )
        if not 0 <= work.num_cached <= num_cached_at_most:
            raise ValueError(
                f"request {key}: num_cached={work.num_cached}: must be from 0 to {num_cached_at_most}"
            )

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)
