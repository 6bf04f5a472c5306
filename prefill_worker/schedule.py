"""What a prefill instance does at its next iteration boundary. Pure: no tensors, no clock, counts of blocks only.

Two kinds of requests share its blocks. Prompts, first come, first served:

    waiting -> loading (if the pool has some of its KV) -> computing, chunk by chunk -> saving -> gone

A prompt gets blocks for all of its tokens when it starts, and holds them until all of its KV is in the pool. And
candidates of decode instances, from where those pull them:

    waiting -> staging (KV on its way from the pool) -> staged -> gone, when they are unstaged

Candidates have a share of the blocks, and within it they come first: a decode instance waits for them. The share
leaves room for the longest prompt, so neither kind can lock the other out.

Abort takes a request from anywhere. Blocks under a copy are held until the copy is reported, whatever became of the
request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from msgspec.structs import replace

from alignedserve.messages import InstanceLimits, Work
from alignedserve.types import RequestKey


@dataclass
class PrefillPlan:
    # these prompts start: all of their blocks are taken
    starts: list[Work] = field(default_factory=list)
    # of those, start to copy cached KV from the pool; `loaded` follows (after `abort`, when that failed)
    loads: list[Work] = field(default_factory=list)
    # start to copy these candidates' KV from the pool; `staged` follows (after `abort`, when that failed)
    stages: list[Work] = field(default_factory=list)
    # how many tokens of whom to compute, oldest first; `computed` follows
    chunks: list[tuple[RequestKey, int]] = field(default_factory=list)


class State(Enum):
    LOADING = auto()
    COMPUTING = auto()
    SAVING = auto()
    STAGING = auto()
    STAGED = auto()
    # aborted; its blocks may be under a copy
    DYING = auto()


@dataclass(eq=False, slots=True)
class Member:
    work: Work
    num_blocks: int
    state: State
    # tokens whose KV is still to be computed
    num_pending: int = 0


class PrefillSchedule:
    def __init__(self, limits: InstanceLimits, staging_share: float = 0.5) -> None:
        """`staging_share`: of the blocks, for candidates; 0 where decode instances fetch from the pool themselves."""
        needed = -(-limits.max_model_len // limits.block_size)
        if limits.num_blocks < needed:
            raise ValueError(
                f"num_blocks={limits.num_blocks}: a request of max_model_len={limits.max_model_len} needs {needed}"
            )
        num_staging_blocks = min(int(staging_share * limits.num_blocks), limits.num_blocks - needed)
        self.limits = replace(limits, num_staging_blocks=num_staging_blocks)
        self._num_free = limits.num_blocks
        # not started, no blocks; in the order in which they came
        self._prompts_waiting: dict[RequestKey, Work] = {}
        self._stages_waiting: dict[RequestKey, Work] = {}
        # started; likewise
        self._prompts: dict[RequestKey, Member] = {}
        self._stages: dict[RequestKey, Member] = {}

    # ---- orders -----------------------------------------------------------------------------------------------------

    def prefill(self, works: Iterable[Work]) -> None:
        for work in works:
            self._check_new(work, num_cached_at_most=_num_tokens(work) - 1)
            self._prompts_waiting[work.request.key] = work

    def stage(self, works: Iterable[Work]) -> None:
        for work in works:
            self._check_new(work, num_cached_at_most=_num_tokens(work))
            needed, most = self._blocks_for(work.num_cached), self.limits.num_staging_blocks
            if needed > most:
                raise ValueError(
                    f"request {work.request.key}: {needed} blocks to stage, at most {most} are for that"
                )
            self._stages_waiting[work.request.key] = work

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
        """Forgets those that have not started. Returns the others: they are left to `abort`."""
        self._prompts_waiting.clear()
        self._stages_waiting.clear()
        return [key for members in self._holders for key in members]

    def abort(self, key: RequestKey) -> bool:
        """Forgets it, whatever its state. False if nothing is left of it.

        True: its blocks are held until the copy under way is reported by `loaded` or `staged`, or, of a prompt that
        was being computed or saved, until `saved` says that none is.
        """
        self._prompts_waiting.pop(key, None)
        self.unstage([key])
        if key in self._prompts:
            self._prompts[key].state = State.DYING
        return key in self._prompts or key in self._stages

    # ---- what came of plans -----------------------------------------------------------------------------------------

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

    def staged(self, key: RequestKey) -> bool:
        """False: it was aborted or unstaged meanwhile, and is gone."""
        if self._bury(self._stages, key):
            return False
        self._stages[key].state = State.STAGED
        return True

    # ---- counts -----------------------------------------------------------------------------------------------------

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

    def plan(self) -> PrefillPlan:
        """Takes the blocks that it plans with. What it plans fits."""
        plan = PrefillPlan()
        self._start_stages(plan)
        if not self._is_stage_waiting_for_blocks():
            self._start_prompts(plan)
        self._cut_chunks(plan)
        return plan

    def _start_stages(self, plan: PrefillPlan) -> None:
        for key, work in list(self._stages_waiting.items()):
            num_blocks = self._blocks_for(work.num_cached)
            if (
                num_blocks > self._num_free
                or self.num_staged_blocks + num_blocks > self.limits.num_staging_blocks
            ):
                break
            self._stages[key] = self._member(self._stages_waiting.pop(key), num_blocks, State.STAGING)
            plan.stages.append(work)

    def _is_stage_waiting_for_blocks(self) -> bool:
        """Rather than for others' end: what becomes free is for it then, not for new prompts."""
        work = next(iter(self._stages_waiting.values()), None)
        if work is None:
            return False
        return self.num_staged_blocks + self._blocks_for(work.num_cached) <= self.limits.num_staging_blocks

    def _start_prompts(self, plan: PrefillPlan) -> None:
        num_slots = self.limits.max_num_seqs - sum(
            member.state in (State.LOADING, State.COMPUTING) for member in self._prompts.values()
        )
        for key, work in list(self._prompts_waiting.items())[: max(num_slots, 0)]:
            num_blocks = self._blocks_for(_num_tokens(work))
            if num_blocks > self._num_free:
                break
            state = State.LOADING if work.num_cached else State.COMPUTING
            self._prompts[key] = self._member(self._prompts_waiting.pop(key), num_blocks, state)
            plan.starts.append(work)
            if work.num_cached:
                plan.loads.append(work)

    def _cut_chunks(self, plan: PrefillPlan) -> None:
        budget = self.limits.max_num_batched_tokens
        for key, member in self._prompts.items():
            if budget == 0:
                break
            if member.state is State.COMPUTING:
                count = min(member.num_pending, budget)
                budget -= count
                plan.chunks.append((key, count))

    # ---- blocks -----------------------------------------------------------------------------------------------------

    @property
    def _holders(self) -> tuple[dict[RequestKey, Member], dict[RequestKey, Member]]:
        return self._prompts, self._stages

    def _member(self, work: Work, num_blocks: int, state: State) -> Member:
        self._num_free -= num_blocks
        return Member(work, num_blocks, state, _num_tokens(work) - work.num_cached)

    def _free(self, member: Member) -> None:
        self._num_free += member.num_blocks

    def _bury(self, members: dict[RequestKey, Member], key: RequestKey) -> bool:
        is_dying = members[key].state is State.DYING
        if is_dying:
            self._free(members.pop(key))
        return is_dying

    def _check_new(self, work: Work, num_cached_at_most: int) -> None:
        key, num_tokens = work.request.key, _num_tokens(work)
        waiting = (self._prompts_waiting, self._stages_waiting)
        if any(key in members for members in (*waiting, *self._holders)):
            raise RuntimeError(f"request {key}: ordered, but it is here already")
        if num_tokens >= self.limits.max_model_len:
            raise ValueError(
                f"request {key}: {num_tokens} tokens; at most {self.limits.max_model_len - 1} leave room for one more"
            )
        if not 0 <= work.num_cached <= num_cached_at_most:
            raise ValueError(
                f"request {key}: num_cached={work.num_cached}: must be from 0 to {num_cached_at_most}"
            )

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)


def _num_tokens(work: Work) -> int:
    return len(work.request.prompt) + len(work.output)
