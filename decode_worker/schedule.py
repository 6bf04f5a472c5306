"""What a decode instance does at its next iteration boundary. Pure: no tensors, no clock, counts of blocks only.

The running batch R, candidate requests Q (they belong with R) and the candidate batch B (it runs next), after each
iteration (DESIGN section 8):
1. who ended leaves, and its blocks are free;
2. when R will not fit: victims are named (`victims.py`). Eviction takes the router a moment (it has to find room in
   the pool), so victims are named `evict_ahead` iterations early. A victim runs on while that takes no new block; it
   stands still from then until its Evict order comes;
3. Q is admitted in order while there are slots and blocks;
4. B is admitted likewise once Q is empty and R is below its fill mark.
Admission leaves the blocks that all of R, the newcomer too, needs for `admit_ahead` iterations: more than
`evict_ahead`, or the same request would be evicted soon after.

Where the discipline has deadlines, and how long iterations take can be foretold, real time (RT) and best effort (BE)
share it like this (`mixing.py`):

- **Time.** All RT runs, and of BE as much as keeps the iteration within what RT's next tokens allow. The others sit
  out: they keep their blocks, and nothing is moved. Without RT everybody runs. While RT is about to come, iterations
  are short, and none begins in the moment in which its KV is on its way.
- **Room.** RT is admitted before BE, which leaves some blocks and a slot free for it. When RT finds none all the same,
  BE is evicted.
- **Trickle.** While BE is there, a credit grows, which is spent on BE beyond what RT allows.

A request is in one place at a time:

    candidate -> pulling (blocks taken, KV on its way) -> running -> leaving (KV on its way to the pool) -> gone

Abort takes it from anywhere. Blocks under a copy are held until the copy is reported, whatever became of the request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from alignedserve.estimate import Estimate
from alignedserve.messages import InstanceLimits, Work
from alignedserve.types import InstanceId, RequestKey
from decode_worker.members import Member
from decode_worker.mixing import Mixing
from decode_worker.options import DecodeOptions
from decode_worker.plan import DecodePlan
from decode_worker.victims import by_length, by_worth

Members = dict[RequestKey, Member]


class DecodeSchedule:
    def __init__(
        self,
        limits: InstanceLimits,
        options: DecodeOptions | None = None,
        estimate: Estimate | None = None,
    ) -> None:
        """Without an estimate there are no deadlines, only classes."""
        self.limits = limits
        self.options = options or DecodeOptions()
        has_deadlines = self.options.discipline.has_deadlines
        self._mixing = (
            Mixing(limits, self.options.mix, estimate) if estimate is not None and has_deadlines else None
        )
        needed = self._blocks_for(limits.max_model_len)
        if limits.num_blocks < needed:
            raise ValueError(
                f"num_blocks={limits.num_blocks}: a request of max_model_len={limits.max_model_len} needs {needed}"
            )
        self._num_free = limits.num_blocks
        self._candidates: Members = {}
        self._candidate_batch: Members = {}
        self._pulling: Members = {}
        self._running: Members = {}
        self._leaving: Members = {}
        # aborted under a copy
        self._dying: Members = {}
        self._num_batches = 0
        self._running_batch = 0
        self._num_iterations = 0
        self._wants_evicted: list[RequestKey] = []

    # ---- orders -----------------------------------------------------------------------------------------------------

    def offer(self, works: Iterable[Work], is_batch: bool, source: InstanceId | None = None) -> None:
        """Candidates from here on. A batch is one by itself, also beside what is left of an earlier one."""
        self._num_batches += is_batch
        into = self._candidate_batch if is_batch else self._candidates
        for work in works:
            into[work.request.key] = self._member(work, source)

    def expect(self, num_prefilling: int, num_ready: int, now: float) -> None:
        """Real time that will be offered in a moment: prompts that are computed, and those that have been."""
        if self._mixing:
            self._mixing.expect(num_prefilling, num_ready, now)

    def withdraw(self, keys: Iterable[RequestKey]) -> list[RequestKey]:
        """Takes candidates back. Returns those that were: the others are being admitted, were, or are unknown."""
        return [key for key in keys if self._drop_candidate(key)]

    def drop_candidates(self) -> list[RequestKey]:
        """Takes all of them back. Returns those that are being pulled: they are left to `abort`."""
        self._candidates.clear()
        self._candidate_batch.clear()
        return list(self._pulling)

    def evict(self, key: RequestKey) -> bool:
        """It runs no more; its blocks are held until `evicted`. False, and nothing changed, if it does not run."""
        if key not in self._running:
            return False
        self._leaving[key] = self._running.pop(key)
        return True

    def abort(self, key: RequestKey) -> bool:
        """Forgets it, whatever its state. True if its blocks are held until the copy under way is reported."""
        if self._drop_candidate(key):
            return False
        if key in self._running:
            self._free(self._running.pop(key))
            return False
        for members in (self._pulling, self._leaving):
            if key in members:
                self._dying[key] = members.pop(key)
        return key in self._dying

    # ---- what came of plans -----------------------------------------------------------------------------------------

    def pulled(self, key: RequestKey) -> bool:
        """Its KV has arrived. True: it runs from here on; False: it was aborted meanwhile, and is gone."""
        if self._bury(key):
            return False
        self._running[key] = self._pulling.pop(key)
        return True

    def pull_failed(self, key: RequestKey) -> None:
        if not self._bury(key):
            self._free(self._pulling.pop(key))

    def evicted(self, key: RequestKey) -> bool:
        """Its KV is in the pool, and it is gone. False if it was aborted meanwhile."""
        if self._bury(key):
            return False
        self._free(self._leaving.pop(key))
        return True

    def evict_failed(self, key: RequestKey) -> bool:
        """True: it runs again; False: it was aborted meanwhile, and is gone."""
        if self._bury(key):
            return False
        self._running[key] = self._leaving.pop(key)
        return True

    def took(self, seconds: float, outside_s: float = 0.0) -> None:
        """The iteration of the last plan, and what part of it was outside the engine. Corrects what the next ones are
        foretold to take."""
        if self._mixing:
            self._mixing.took(seconds, outside_s)

    def computed(self, key: RequestKey, count: int) -> None:
        """A part of what was pending; no token came of it."""
        self._running[key].num_cached += count

    def sampled(self, keys: Iterable[RequestKey]) -> None:
        for key in keys:
            member = self._running[key]
            member.num_cached = member.num_tokens
            member.num_tokens += 1

    def ended(self, key: RequestKey) -> None:
        self._free(self._running.pop(key))

    # ---- counts -----------------------------------------------------------------------------------------------------

    @property
    def pace(self) -> float:
        """Of iterations, measured over predicted."""
        return self._mixing.estimate.pace if self._mixing else 1.0

    @property
    def num_free_blocks(self) -> int:
        return self._num_free

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_candidates(self) -> int:
        return len(self._candidates) + len(self._candidate_batch)

    def best_effort(self) -> tuple[int, int]:
        """Requests of it that run, and their blocks."""
        blocks = [member.num_blocks for member in self._running.values() if not member.is_rt]
        return len(blocks), sum(blocks)

    def lengths(self) -> list[int]:
        """Of all that run, in tokens."""
        return [member.num_tokens for member in self._running.values()]

    def source_of(self, key: RequestKey) -> InstanceId | None:
        """Where to pull it from; of a request in a plan's pulls."""
        return self._pulling[key].source

    def check(self) -> None:
        """Every block is held once or free."""
        num_held = sum(member.num_blocks for members in self._holders for member in members.values())
        if num_held + self._num_free != self.limits.num_blocks:
            raise RuntimeError(
                f"blocks leaked: {num_held} held + {self._num_free} free != {self.limits.num_blocks} in all"
            )

    def check_idle(self) -> None:
        self.check()
        num_left = self.num_candidates + sum(map(len, self._holders))
        if num_left:
            raise RuntimeError(f"idle, but {num_left} requests are left")

    # ---- planning ---------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> DecodePlan:
        """Takes the blocks that it plans with. What it plans fits."""
        if self._mixing:
            waiting = [*self._candidates.values(), *self._candidate_batch.values()]
            self._mixing.look([*self._running.values()], [*self._pulling.values()], waiting, now)
        plan = DecodePlan(wants_evicted=self._choose_victims())
        if self._mixing:
            self._admit_real_time(self._mixing, plan.pulls)
        self._run(plan)
        self._admit(plan.pulls)
        return plan

    # ---- victims ----

    def _choose_victims(self) -> list[RequestKey]:
        """At least one request is left to run: whatever it needs, the instance holds."""
        missing = self._growth(self.options.evict_ahead) - self._num_free
        missing -= sum(member.num_blocks for member in (*self._leaving.values(), *self._dying.values()))
        victims: dict[RequestKey, None] = {}
        for member in self._in_order_of_eviction(self._running.values())[:-1] if missing > 0 else ():
            if missing > 0:
                victims[member.key] = None
                missing -= member.num_blocks + self._member_growth(member, self.options.evict_ahead)
        if self._mixing:
            self._choose_for_rt(self._mixing, victims, missing)
        self._wants_evicted = [*victims]
        return [*victims]

    def _choose_for_rt(self, mixing: Mixing, victims: dict[RequestKey, None], missing: int) -> None:
        """Best effort that makes room for real time that waits, or for the next one that comes.

        `missing`: blocks, before that; below zero, so many are to spare.
        """
        be = [
            each for each in self._running.values() if not (each.is_rt or each.is_owed or each.key in victims)
        ]
        if not be:
            return
        most_blocks = sum(each.num_blocks for each in be) - missing
        num_blocks, num_slots = self._needed_for_rt([*self._rt_waiting()], most_blocks, len(be))
        if not num_slots:
            num_blocks, num_slots = mixing.least_headroom()
        missing += num_blocks
        missing_slots = num_slots - self._num_free_slots - len(self._leaving) - len(victims)
        for member in self._in_order_of_eviction(be) if missing > 0 or missing_slots > 0 else ():
            if missing <= 0 and missing_slots <= 0:
                break
            victims[member.key] = None
            missing -= member.num_blocks
            missing_slots -= 1

    def _needed_for_rt(self, waiting: Sequence[Member], most_blocks: int, most_slots: int) -> tuple[int, int]:
        """Blocks and slots for these, in order, as far as so many can be had."""
        if not waiting:
            return 0, 0
        most_slots += self._num_free_slots + len(self._leaving)
        ahead, num_blocks, num_slots = self.options.admit_ahead, 0, 0
        reserve = self._growth_of_class(True, ahead) - self._growth_of_class(True, self.options.evict_ahead)
        for member in waiting:
            needed = self._member_growth(member, ahead)
            if reserve + num_blocks + needed > most_blocks or num_slots >= most_slots:
                break
            num_blocks, num_slots = num_blocks + needed, num_slots + 1
        return (reserve + num_blocks, num_slots) if num_slots else (0, 0)

    def _in_order_of_eviction(self, members: Iterable[Member]) -> list[Member]:
        named, mixing = set(self._wants_evicted), self._mixing
        if mixing is None:
            return by_length(members, named, self.options.discipline.has_classes)
        return by_worth(members, named, self.limits.block_size, mixing.is_pressed)

    # ---- who runs ----

    def _run(self, plan: DecodePlan) -> None:
        ready: list[Member] = []
        behind: list[Member] = []
        for member in self._running.values():
            (behind if member.num_tokens - member.num_cached > 1 else ready).append(member)
        self._num_iterations += 1
        mixing = self._mixing
        if mixing is None:
            self._decode(plan, ready)
            self._catch_up(plan, behind, None, [], math.inf)
        elif behind or any(not member.is_rt for member in ready):
            self._run_mixed(mixing, plan, ready, behind)
        else:
            members = self._decode(plan, ready)
            mixing.planned([], [member.num_tokens for member in members], num_be=0)

    def _run_mixed(
        self, mixing: Mixing, plan: DecodePlan, ready: Sequence[Member], behind: Sequence[Member]
    ) -> None:
        """Real time, then as much of best effort as it allows."""
        plan.hold_s = mixing.hold_s([each for each in self._running.values() if each.is_rt])
        if plan.hold_s:
            return
        rt = self._decode(plan, [member for member in ready if member.is_rt])
        rt_behind = [member for member in behind if member.is_rt]
        bound_s = mixing.bound_s([*rt, *rt_behind])
        lengths = [member.num_tokens for member in rt]
        chunks = self._catch_up(plan, rt_behind, mixing, lengths, bound_s)
        be = [member for member in ready if not member.is_rt]
        chosen = self._decode(plan, mixing.choose(rt, be, chunks, bound_s))
        lengths += [member.num_tokens for member in chosen]
        be_behind = [member for member in behind if not member.is_rt]
        chunks += self._catch_up(plan, be_behind, mixing, lengths, bound_s, chunks)
        mixing.planned(chunks, lengths, num_be=len(chosen))

    def _decode(self, plan: DecodePlan, members: Iterable[Member]) -> list[Member]:
        """Those that have a block for their next token."""
        block_size, deciding = self.limits.block_size, []
        for member in members:
            if member.num_tokens <= member.num_blocks * block_size or self._grow(member, member.num_tokens):
                plan.run.append(member.key)
                member.last_run = self._num_iterations
                deciding.append(member)
        return deciding

    def _catch_up(
        self,
        plan: DecodePlan,
        behind: Iterable[Member],
        mixing: Mixing | None,
        lengths: Sequence[int],
        bound_s: float,
        chunks: Sequence[tuple[int, int]] = (),
    ) -> list[tuple[int, int]]:
        """Those whose KV was lost, as far as tokens, blocks and time allow. Returns their chunks."""
        taken: list[tuple[int, int]] = []
        for member in behind:
            budget = self.limits.max_num_batched_tokens - len(plan.run) - sum(count for _, count in taken)
            count = min(member.num_pending, budget)
            if count > 0 and mixing:
                count = mixing.most_tokens(member, count, [*chunks, *taken], lengths, bound_s)
            if count <= 0 or not self._grow(member, member.num_cached + count):
                continue
            taken.append((member.num_cached, count))
            if count == member.num_pending:
                plan.run.append(member.key)
            else:
                plan.chunks.append((member.key, count))
        return taken

    def _grow(self, member: Member, num_tokens: int) -> bool:
        """Blocks for the KV of the first `num_tokens` tokens. Victims get none: they are about to give theirs back."""
        count = self._blocks_for(num_tokens) - member.num_blocks
        if count <= 0:
            return True
        if count > self._num_free or member.key in self._wants_evicted:
            return False
        self._take(member, count)
        return True

    # ---- admission ----

    def _admit(self, pulls: list[Work]) -> None:
        if not self.options.discipline.has_classes:
            self._admit_both(pulls, None)
            return
        if self._mixing is None:
            self._admit_both(pulls, is_rt=True)
        is_rt_waiting = any(True for _ in self._rt_waiting())
        # an instance that runs nothing would not be asked again
        may_pull = self._mixing is None or not self._running or self._mixing.may_pull_be()
        if may_pull and not is_rt_waiting:
            self._admit_both(pulls, is_rt=False)

    def _admit_real_time(self, mixing: Mixing, pulls: list[Work]) -> None:
        """Before an iteration begins, which may wait for its KV."""
        if mixing.is_be_owed and not self._is_be_started:
            self._admit_owed(pulls)
        self._admit_both(pulls, is_rt=True)
        if any(work.deadlines.is_rt for work in pulls):
            mixing.pulls_rt()

    def _admit_both(self, pulls: list[Work], is_rt: bool | None) -> None:
        """Candidate requests, and once there are none the candidate batch; of one class, or of both (None)."""
        self._admit_from(self._candidates, pulls, is_rt, math.inf)
        if not any(is_rt in (None, member.is_rt) for member in self._candidates.values()):
            mark = self.options.fill_mark * self.limits.num_blocks
            self._admit_from(self._candidate_batch, pulls, is_rt, mark)

    def _admit_from(self, queue: Members, pulls: list[Work], is_rt: bool | None, fill_mark: float) -> None:
        for member in [each for each in queue.values() if is_rt in (None, each.is_rt)]:
            if not self._has_room(member) or self.limits.num_blocks - self._num_free >= fill_mark:
                break
            self._admit_one(queue, member, pulls)

    def _admit_owed(self, pulls: list[Work]) -> None:
        """One best-effort request, though real time waits."""
        for queue in (self._candidates, self._candidate_batch):
            for member in queue.values():
                if not member.is_rt and self._num_free_slots > 0 and self._fits(member):
                    member.is_owed = True
                    self._admit_one(queue, member, pulls)
                    return

    def _admit_one(self, queue: Members, member: Member, pulls: list[Work]) -> None:
        del queue[member.key]
        if queue is self._candidate_batch:
            self._running_batch = member.batch
        member.batch = self._running_batch
        self._take(member, self._blocks_for(member.num_tokens))
        self._pulling[member.key] = member
        pulls.append(member.work)

    def _rt_waiting(self) -> Iterable[Member]:
        for members in (self._candidates, self._candidate_batch):
            yield from (member for member in members.values() if member.is_rt)

    @property
    def _is_be_started(self) -> bool:
        return any(not each.is_rt for members in (self._running, self._pulling) for each in members.values())

    @property
    def _num_free_slots(self) -> int:
        return self.limits.max_num_seqs - len(self._running) - len(self._pulling) - len(self._leaving)

    def _has_room(self, newcomer: Member) -> bool:
        """Best effort leaves headroom, unless it is alone: then it may take all. For real time it can give it up."""
        mixing = self._mixing
        if mixing is None:
            return self._num_free_slots > 0 and self._fits(newcomer)
        if newcomer.is_rt:
            growth = self._growth_of_class(True, self.options.admit_ahead)
            growth += self._growth_of_class(False, self.options.evict_ahead)
            needed = self._member_growth(newcomer, self.options.admit_ahead)
            return self._num_free_slots > 0 and needed + growth <= self._num_free
        if not (self._running or self._pulling):
            return self._num_free_slots > 0 and self._fits(newcomer)
        return self._num_free_slots > mixing.num_headroom_slots and self._fits(
            newcomer, mixing.num_headroom_blocks
        )

    def _fits(self, newcomer: Member, num_left: int = 0) -> bool:
        ahead = self.options.admit_ahead
        needed = self._member_growth(newcomer, ahead) + num_left
        return needed <= self._num_free and needed + self._growth(ahead) <= self._num_free

    def _growth(self, num_iterations: int) -> int:
        """Blocks that all who run, or will in a moment, need beyond what they hold."""
        return sum(
            self._growth_of(members.values(), num_iterations) for members in (self._running, self._pulling)
        )

    def _growth_of_class(self, is_rt: bool, num_iterations: int) -> int:
        return sum(
            self._growth_of((each for each in members.values() if each.is_rt is is_rt), num_iterations)
            for members in (self._running, self._pulling)
        )

    def _growth_of(self, members: Iterable[Member], num_iterations: int) -> int:
        """The sum of `_member_growth`, without its calls: in every iteration all members are asked."""
        growth, num_more, block_size = 0, num_iterations - 1, self.limits.block_size
        for member in members:
            num_cached = member.num_tokens + num_more
            if num_cached > member.max_cached:
                num_cached = member.max_cached
            missing = num_cached - member.num_blocks * block_size
            if missing > 0:
                growth += self._blocks_for(missing)
        return growth

    def _member_growth(self, member: Member, num_iterations: int) -> int:
        num_cached = min(member.num_tokens + num_iterations - 1, member.max_cached)
        return max(0, self._blocks_for(num_cached) - member.num_blocks)

    # ---- blocks -----------------------------------------------------------------------------------------------------

    @property
    def _holders(self) -> Sequence[Members]:
        return self._pulling, self._running, self._leaving, self._dying

    def _member(self, work: Work, source: InstanceId | None) -> Member:
        key, request = work.request.key, work.request
        if self._knows(key):
            raise RuntimeError(f"request {key}: offered, but it is here already")
        num_tokens = len(request.prompt) + len(work.output)
        room = self.limits.max_model_len - len(request.prompt)
        max_cached = len(request.prompt) + min(request.params.max_tokens or room, room) - 1
        if not 0 <= work.num_cached < num_tokens <= max_cached:
            raise ValueError(
                f"request {key}: {work.num_cached} tokens cached, {num_tokens} known, at most {max_cached} to cache: "
                "must ascend"
            )
        return Member(
            work, source, self._num_batches, num_tokens, work.num_cached, max_cached, work.deadlines.is_rt
        )

    def _knows(self, key: RequestKey) -> bool:
        return any(key in members for members in (self._candidates, self._candidate_batch, *self._holders))

    def _drop_candidate(self, key: RequestKey) -> bool:
        return any(members.pop(key, None) for members in (self._candidates, self._candidate_batch))

    def _bury(self, key: RequestKey) -> bool:
        member = self._dying.pop(key, None)
        if member:
            self._free(member)
        return member is not None

    def _take(self, member: Member, count: int) -> None:
        self._num_free -= count
        member.num_blocks += count

    def _free(self, member: Member) -> None:
        self._num_free += member.num_blocks

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)
