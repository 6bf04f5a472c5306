"""What a decode instance does at its next iteration boundary. Pure: no tensors, no clock, counts of blocks only.

The running batch R, candidate requests Q (they belong with R) and the candidate batch B (it runs next), after each
iteration (DESIGN section 8):
1. who ended leaves, and its blocks are free;
2. when R will not fit: victims are named. The longest goes first, of the older batch while two are mixed, and
   best-effort requests before those with a deadline for each token. Eviction takes the router a moment (it has to find
   room in the pool), so victims are named `evict_ahead` iterations early. A victim runs on while that takes no new
   block; it stands still from then until its Evict order comes;
3. Q is admitted in order while there are slots and blocks;
4. B is admitted likewise once Q is empty and R is below its fill mark.
Admission leaves the blocks that all of R, the newcomer too, needs for `admit_ahead` iterations: more than
`evict_ahead`, or the same request would be evicted soon after.

A request is in one place at a time:

    candidate -> pulling (blocks taken, KV on its way) -> running -> leaving (KV on its way to the pool) -> gone

Abort takes it from anywhere. Blocks under a copy are held until the copy is reported, whatever became of the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from alignedserve.messages import InstanceLimits, Work
from alignedserve.types import InstanceId, RequestKey


@dataclass(frozen=True)
class DecodeOptions:
    # victims are named so many iterations before blocks run out
    evict_ahead: int = 4
    # admission leaves blocks for so many iterations
    admit_ahead: int = 32
    # share of the blocks; the candidate batch is admitted while fewer are in use
    fill_mark: float = 1.0


@dataclass
class DecodePlan:
    # start to copy the KV of these; their blocks are taken, `pulled` or `pull_failed` follows
    pulls: list[Work] = field(default_factory=list)
    # these compute all that they have pending, one token as a rule, and sample the next: `sampled` follows
    run: list[RequestKey] = field(default_factory=list)
    # these compute so many tokens and are not done with it: `computed` follows
    chunks: list[tuple[RequestKey, int]] = field(default_factory=list)
    # all whose eviction is wanted now, whether it was said before or not
    wants_evicted: list[RequestKey] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Member:
    work: Work
    # the prefill instance that has it staged; None: the pool
    source: InstanceId | None
    # which batch it came with; a candidate request belongs to the one that runs when it is admitted
    batch: int
    # prompt and output
    num_tokens: int
    # tokens whose KV exists
    num_cached: int
    # tokens whose KV it will ever need
    max_cached: int
    num_blocks: int = 0

    @property
    def key(self) -> RequestKey:
        return self.work.request.key

    @property
    def num_pending(self) -> int:
        return self.num_tokens - self.num_cached

    @property
    def has_deadlines(self) -> bool:
        return self.work.request.tbt_s is not None


Members = dict[RequestKey, Member]


class DecodeSchedule:
    def __init__(self, limits: InstanceLimits, options: DecodeOptions | None = None) -> None:
        self.limits = limits
        self.options = options or DecodeOptions()
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
        self._wants_evicted: list[RequestKey] = []

    # ---- orders -----------------------------------------------------------------------------------------------------

    def offer(self, works: Iterable[Work], is_batch: bool, source: InstanceId | None = None) -> None:
        """Candidates from here on. A batch is one by itself, also beside what is left of an earlier one."""
        self._num_batches += is_batch
        into = self._candidate_batch if is_batch else self._candidates
        for work in works:
            into[work.request.key] = self._member(work, source)

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
    def num_free_blocks(self) -> int:
        return self._num_free

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_candidates(self) -> int:
        return len(self._candidates) + len(self._candidate_batch)

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

    def plan(self) -> DecodePlan:
        """Takes the blocks that it plans with. What it plans fits."""
        plan = DecodePlan(wants_evicted=self._choose_victims())
        self._run(plan)
        self._admit(plan.pulls, self._candidates)
        if not self._candidates:
            self._admit(plan.pulls, self._candidate_batch, self.options.fill_mark * self.limits.num_blocks)
        return plan

    def _choose_victims(self) -> list[RequestKey]:
        """At least one request is left to run: whatever it needs, the instance holds."""
        missing = self._growth(self.options.evict_ahead) - self._num_free
        missing -= sum(member.num_blocks for member in (*self._leaving.values(), *self._dying.values()))
        victims: list[RequestKey] = []
        for member in self._in_order_of_eviction()[:-1] if missing > 0 else ():
            if missing > 0:
                victims.append(member.key)
                missing -= member.num_blocks + self._member_growth(member, self.options.evict_ahead)
        self._wants_evicted = victims
        return list(victims)

    def _in_order_of_eviction(self) -> list[Member]:
        """Those that were named before stay named."""
        named = set(self._wants_evicted)

        def order(member: Member) -> tuple[bool, bool, int, int]:
            return member.key not in named, member.has_deadlines, member.batch, -member.num_tokens

        return sorted(self._running.values(), key=order)

    def _run(self, plan: DecodePlan) -> None:
        behind, block_size = [], self.limits.block_size
        for key, member in self._running.items():
            num_tokens = member.num_tokens
            if num_tokens - member.num_cached > 1:
                behind.append(member)
            elif num_tokens <= member.num_blocks * block_size or self._grow(member, num_tokens):
                plan.run.append(key)
        budget = self.limits.max_num_batched_tokens - len(plan.run)
        for member in behind:
            count = min(member.num_pending, budget)
            if count == 0 or not self._grow(member, member.num_cached + count):
                continue
            budget -= count
            if count == member.num_pending:
                plan.run.append(member.key)
            else:
                plan.chunks.append((member.key, count))

    def _grow(self, member: Member, num_tokens: int) -> bool:
        """Blocks for the KV of the first `num_tokens` tokens. Victims get none: they are about to give theirs back."""
        count = self._blocks_for(num_tokens) - member.num_blocks
        if count <= 0:
            return True
        if count > self._num_free or member.key in self._wants_evicted:
            return False
        self._take(member, count)
        return True

    def _admit(self, pulls: list[Work], queue: Members, fill_mark: float | None = None) -> None:
        for member in list(queue.values()):
            num_used = self.limits.num_blocks - self._num_free
            if not self._has_room(member) or (fill_mark is not None and num_used >= fill_mark):
                break
            del queue[member.key]
            if fill_mark is not None:
                self._running_batch = member.batch
            member.batch = self._running_batch
            self._take(member, self._blocks_for(member.num_tokens))
            self._pulling[member.key] = member
            pulls.append(member.work)

    def _has_room(self, newcomer: Member) -> bool:
        ahead = self.options.admit_ahead
        num_slots = self.limits.max_num_seqs - len(self._running) - len(self._pulling) - len(self._leaving)
        needed = self._member_growth(newcomer, ahead)
        return num_slots > 0 and needed <= self._num_free and needed + self._growth(ahead) <= self._num_free

    def _growth(self, num_iterations: int) -> int:
        """Blocks that all who run, or will in a moment, need beyond what they hold."""
        return sum(
            self._growth_of(members.values(), num_iterations) for members in (self._running, self._pulling)
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
        return Member(work, source, self._num_batches, num_tokens, work.num_cached, max_cached)

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
