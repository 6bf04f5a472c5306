"""Any order of messages, time passing and restarts, against a pool made of a dict."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from alignedserve.kvpool.owners import AllocationState, OwnerTable
from alignedserve.kvpool.pool import Pool, PoolConfig, gone
from alignedserve.protocol.messages import (
    Candidates,
    Commit,
    FindNear,
    FormBatch,
    MakeSpare,
    Release,
    Reserve,
    Reserved,
)
from alignedserve.types import InstanceId, RequestKey

NUM_BLOCKS, BLOCK_SIZE, LAPSE_S = 16, 4, 5
DECODE = InstanceId("decode-0")
KEYS = st.integers(1, 7).map(RequestKey)
COUNTS = st.integers(1, 30)


@dataclass
class Kept:
    blocks: list[int]
    num_tokens: int = 0
    state: AllocationState = AllocationState.RESERVED
    deadline_s: float = 0
    is_candidate: bool = False


class PoolStates(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = OwnerTable.plain(NUM_BLOCKS)
        self.kept: dict[RequestKey, Kept] = {}
        # oldest first
        self.spares: list[RequestKey] = []
        self.start()

    def start(self) -> None:
        self.pool = Pool(self.table, BLOCK_SIZE, self.now, PoolConfig(LAPSE_S, horizon_s=1))

    @property
    def num_free(self) -> int:
        return NUM_BLOCKS - sum(len(kept.blocks) for kept in self.kept.values())

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
            kept.state, kept.is_candidate = AllocationState.SPARE, False
            self.spares.append(key)

    @rule(key=KEYS, num_tokens=COUNTS)
    def reserve(self, key: RequestKey, num_tokens: int) -> None:
        kept = self.kept.get(key, Kept([]))
        needed = max(-(-num_tokens // BLOCK_SIZE), len(kept.blocks))
        num_found, dropped = self.num_free + len(kept.blocks), []
        for spare in self.spares:
            if num_found < needed and spare != key:
                dropped.append(spare)
                num_found += len(self.kept[spare].blocks)
        (answer,) = self.pool.on(Reserve(key, num_tokens), self.now)
        if num_found < needed:
            assert answer == Reserved(key, None)
            return
        assert isinstance(answer, Reserved) and answer.key == key and answer.dropped == dropped
        assert answer.blocks is not None and len(answer.blocks) == needed
        assert answer.blocks[: len(kept.blocks)] == kept.blocks
        for spare in [*dropped, key]:
            self.forget(spare)
        self.kept[key] = Kept(
            list(answer.blocks), kept.num_tokens, AllocationState.RESERVED, self.now + LAPSE_S
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
        assert sum(-(-self.kept[key].num_tokens // BLOCK_SIZE) for key in keys) <= max_blocks
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
        lost = [key for key in late if not self.kept[key].num_tokens]
        for key in late:
            self.fall_back(key)
        answers = self.pool.tick(self.now)
        assert len(answers) == len(lost) and all(gone(key) in answers for key in lost)

    @rule(is_killed=st.booleans())
    def says_hello(self, is_killed: bool) -> None:
        if is_killed:
            self.start()
            # the order in which they became spares is not written down
            self.spares.sort(key=lambda key: self.kept[key].blocks[0])
        for kept in self.kept.values():
            kept.is_candidate = False
            if is_killed:
                kept.deadline_s = self.now + LAPSE_S
        found = {stored.key: (stored.blocks, stored.num_tokens) for stored in self.pool.inventory()}
        assert found == {key: (kept.blocks, kept.num_tokens) for key, kept in self.kept.items()}

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert self.pool.num_free_blocks == self.num_free
        assert self.pool.num_spare_blocks == sum(len(self.kept[key].blocks) for key in self.spares)
        assert self.pool.num_candidates == sum(kept.is_candidate for kept in self.kept.values())

    def teardown(self) -> None:
        self.pool.on(Release(list(self.kept)), self.now)
        self.pool.check_idle()
        assert self.pool.num_free_blocks == NUM_BLOCKS and self.table.num_owned == 0


TestPoolStates = PoolStates.TestCase
TestPoolStates.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
