"""Any order of messages, time passing and restarts, against a pool made of a dict. Requests share blocks of common
beginnings. The model knows what each block holds, and takes from the pool only which of two equal blocks is known."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from alignedserve.kv.groups import STATE_WINDOW
from alignedserve.kv.span import KvSpan
from alignedserve.kvpool.owners import AllocationState, OwnerTable
from alignedserve.kvpool.pool import Pool, PoolConfig, gone
from alignedserve.protocol.messages import (
    Candidates,
    Commit,
    FindNear,
    ForgetAll,
    FormBatch,
    MakeSpare,
    Release,
    Reserve,
    Reserved,
)
from alignedserve.types import InstanceId, RequestKey
from tests.kvpool.allocator_steps import hashes_of

# The prompts of the requests: those with a common beginning have hashes in common.
PROMPTS = ("", "", "aaaaaa", "aab", "aaab", "b", "aa", "aaaaab")
NUM_BLOCKS, BLOCK_SIZE, LAPSE_S = 16, 4, 5
DECODE = InstanceId("decode-0")
KEYS = st.integers(1, 7).map(RequestKey)
COUNTS = st.integers(1, 30)


def prompt_hashes(key: RequestKey) -> list[bytes]:
    return hashes_of(PROMPTS[key], len(PROMPTS[key]))


@dataclass
class Kept:
    blocks: list[int]
    num_tokens: int = 0
    state: AllocationState = AllocationState.RESERVED
    deadline_s: float = 0
    is_candidate: bool = False
    # Nothing was committed, and it was no spare.
    is_new: bool = False


class PoolStates(RuleBasedStateMachine):
    span = KvSpan(BLOCK_SIZE)

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = OwnerTable.plain(NUM_BLOCKS)
        self.kept: dict[RequestKey, Kept] = {}
        # the hash of what was last committed to each block
        self.content: dict[int, bytes] = {}
        # oldest first
        self.spares: list[RequestKey] = []
        self.start()

    def start(self) -> None:
        config = PoolConfig(LAPSE_S, horizon_s=1, span=self.span, promised_share=0.5)
        self.pool = Pool(self.table, BLOCK_SIZE, self.now, config)

    @property
    def listed(self) -> set[int]:
        return {block for kept in self.kept.values() for block in kept.blocks}

    @property
    def needed(self) -> set[int]:
        kept = [each for each in self.kept.values() if each.state is not AllocationState.SPARE]
        return {block for each in kept for block in each.blocks}

    @property
    def known(self) -> dict[bytes, int]:
        return {block_hash: int(block) for block, block_hash in self.pool._allocator.known.items()}

    def found(self, key: RequestKey, num_tokens: int) -> list[int]:
        known, hashes = self.known, prompt_hashes(key)[: (num_tokens - 1) // BLOCK_SIZE]
        return [known[each] for each in takewhile(known.__contains__, hashes)]

    def forget(self, key: RequestKey) -> None:
        self.kept.pop(key, None)
        if key in self.spares:
            self.spares.remove(key)

    def fall_back(self, key: RequestKey) -> None:
        kept = self.kept[key]
        if kept.num_tokens == 0:
            self.forget(key)
        elif kept.state is not AllocationState.SPARE:
            kept.blocks = kept.blocks[: -(-kept.num_tokens // BLOCK_SIZE)]
            kept.state, kept.is_candidate, kept.is_new = AllocationState.SPARE, False, False
            self.spares.append(key)

    @rule(key=KEYS, num_tokens=COUNTS)
    def reserve(self, key: RequestKey, num_tokens: int) -> None:
        if self.span.has_state and key in self.kept and not self.kept[key].num_tokens:
            self.forget(key)
        kept = self.kept.get(key)
        found = [] if kept else self.found(key, num_tokens)
        before = kept.blocks if kept else found
        num_missing = max(-(-num_tokens // BLOCK_SIZE) - len(before), 0)
        num_free, spares = self.pool.num_free_blocks, list(self.spares)
        num_room = NUM_BLOCKS - len(self.needed | {*before})
        asked = Reserve(key, num_tokens, hashes=prompt_hashes(key), owner=PROMPTS[key][:1])
        (answer,) = self.pool.on(asked, self.now)
        if num_room < num_missing:
            assert answer == Reserved(key, None)
            return
        assert isinstance(answer, Reserved) and answer.key == key and answer.blocks is not None
        assert len(answer.blocks) == len(before) + num_missing and answer.blocks[: len(before)] == before
        assert answer.num_found == len(found) * BLOCK_SIZE
        assert answer.num_tokens == (kept.num_tokens if kept else answer.num_found)
        # the oldest ones, except those with blocks that others need
        assert answer.dropped == [spare for spare in spares if spare in answer.dropped]
        assert key not in answer.dropped and (num_missing > num_free or not answer.dropped)
        for spare in answer.dropped:
            self.forget(spare)
        assert not self.listed & {*answer.blocks[len(before) :]}
        for block in answer.blocks[len(before) :]:
            self.content.pop(block, None)
        assert [self.content[block] for block in found] == prompt_hashes(key)[: len(found)]
        self.forget(key)
        replaces = self.span.has_state and num_tokens > answer.num_tokens and answer.num_tokens % BLOCK_SIZE
        self.kept[key] = Kept(
            list(answer.blocks),
            0 if replaces else answer.num_tokens,
            AllocationState.RESERVED,
            self.now + LAPSE_S,
            is_new=kept.is_new if kept else True,
        )

    @rule(key=KEYS, num_tokens=COUNTS, due_in_s=st.integers(0, 4), is_candidate=st.booleans())
    def commit(self, key: RequestKey, num_tokens: int, due_in_s: int, is_candidate: bool) -> None:
        answers = self.pool.on(Commit(key, num_tokens, self.now + due_in_s, is_candidate), self.now)
        kept = self.kept.get(key)
        self.forget(key)
        if kept is None or len(kept.blocks) * BLOCK_SIZE < num_tokens:
            assert answers == [gone(key)]
            return
        assert answers == []
        num_full = min(num_tokens // BLOCK_SIZE, len(prompt_hashes(key)))
        self.content |= zip(kept.blocks[:num_full], prompt_hashes(key), strict=False)
        self.kept[key] = Kept(kept.blocks, num_tokens, AllocationState.HELD, is_candidate=is_candidate)

    @rule(keys=st.lists(KEYS, max_size=3))
    def make_spare(self, keys: list[RequestKey]) -> None:
        assert self.pool.on(MakeSpare(keys), self.now) == []
        for key in keys:
            if key in self.kept:
                self.fall_back(key)

    @rule(keys=st.lists(KEYS, max_size=3))
    def release(self, keys: list[RequestKey]) -> None:
        assert self.pool.on(Release(keys), self.now) == []
        for key in keys:
            self.forget(key)

    @rule(era=st.integers(1, 3))
    def may_all_be_wrong(self, era: int) -> None:
        assert self.pool.on(ForgetAll(era), self.now) == []
        assert not self.known

    @rule(key=KEYS, seconds=st.integers(1, 9), owner=st.sampled_from("ab"))
    def promise(self, key: RequestKey, seconds: int, owner: str) -> None:
        hashes, num_known = prompt_hashes(key), len(self.known)
        was_taken = self.pool._allocator.promise(hashes, owner, self.now + seconds)
        assert not was_taken or self.known.keys() >= {*hashes}
        assert len(self.known) == num_known and self.pool.use.num_promised_blocks <= NUM_BLOCKS // 2

    @rule(max_blocks=COUNTS, min_requests=st.integers(0, 5), max_requests=st.integers(0, 5))
    def form_batch(self, max_blocks: int, min_requests: int, max_requests: int) -> None:
        (answer,) = self.pool.on(FormBatch(DECODE, max_blocks, min_requests, max_requests), self.now)
        assert isinstance(answer, Candidates) and answer.is_batch
        any_fits = any(
            kept.is_candidate and kept.num_tokens <= max_blocks * BLOCK_SIZE for kept in self.kept.values()
        )
        assert bool(answer.keys) == (any_fits and max_requests > 0)
        self.named(answer.keys, max_blocks, max_requests)

    @rule(low=COUNTS, width=COUNTS, max_blocks=COUNTS, max_requests=st.integers(0, 5))
    def find_near(self, low: int, width: int, max_blocks: int, max_requests: int) -> None:
        (answer,) = self.pool.on(FindNear(DECODE, low, low + width, max_blocks, max_requests), self.now)
        assert isinstance(answer, Candidates) and not answer.is_batch
        assert all(low <= self.kept[key].num_tokens <= low + width for key in answer.keys)
        self.named(answer.keys, max_blocks, max_requests)

    def named(self, keys: list[RequestKey], max_blocks: int, max_requests: int) -> None:
        assert len(keys) == len(set(keys)) <= max_requests
        taken = [self.kept[key].blocks[: -(-self.kept[key].num_tokens // BLOCK_SIZE)] for key in keys]
        assert len({block for blocks in taken for block in blocks}) <= max_blocks
        for key in keys:
            assert self.kept[key].is_candidate
            self.kept[key].is_candidate = False

    @rule(seconds=st.integers(0, 4))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        late = [
            key
            for key, kept in self.kept.items()
            if kept.state is AllocationState.RESERVED and kept.deadline_s <= self.now
        ]
        # An instance may still be computing a prompt of which nothing was committed.
        lost = [key for key in late if self.kept[key].is_new or not self.kept[key].num_tokens]
        for key in late:
            if key in lost:
                self.forget(key)
            else:
                self.fall_back(key)
        answers = self.pool.tick(self.now)
        assert len(answers) == len(lost) and all(gone(key) in answers for key in lost)

    @rule(is_killed=st.booleans())
    def says_hello(self, is_killed: bool) -> None:
        if is_killed:
            self.start()
            # the order in which they became spares is not written down
            self.spares = [each.key for each in self.pool.inventory() if each.key in self.spares]
        for kept in self.kept.values():
            kept.is_candidate = False
            if is_killed:
                kept.deadline_s = self.now + LAPSE_S
        found = {stored.key: (stored.blocks, stored.num_tokens) for stored in self.pool.inventory()}
        assert found == {key: (kept.blocks, kept.num_tokens) for key, kept in self.kept.items()}

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        num_kept = len({*self.known.values()} - self.listed)
        assert self.pool.num_free_blocks == NUM_BLOCKS - len(self.listed) - num_kept
        assert self.pool.num_spare_blocks == len(self.listed - self.needed) + num_kept
        assert self.pool.use.num_kept_blocks == num_kept
        # what is known is what a request has committed, and nothing else was written there since
        assert all(self.content[block] == block_hash for block_hash, block in self.known.items())
        assert self.pool.num_candidates == sum(kept.is_candidate for kept in self.kept.values())

    def teardown(self) -> None:
        self.pool.on(Release(list(self.kept)), self.now)
        self.pool.check_idle()
        assert self.pool.num_free_blocks + self.pool.use.num_kept_blocks == NUM_BLOCKS
        assert self.table.num_requests == 0


class WithStates(PoolStates):
    """The KV of a request that has lost its state is of no use, and its next reservation is like its first one."""

    span = KvSpan(BLOCK_SIZE, window=STATE_WINDOW, tile_tokens=1, has_state=True)


TestPoolStates, TestWithStates = PoolStates.TestCase, WithStates.TestCase
TestPoolStates.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestWithStates.settings = settings(TestPoolStates.settings, max_examples=50)
