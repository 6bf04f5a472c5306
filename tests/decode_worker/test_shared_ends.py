"""Blocks that real time and best effort fill from both ends: each rule by hand, and whatever order things come in."""

from __future__ import annotations

from collections import Counter
from itertools import count
from random import Random

import pytest

from alignedserve.decode_worker.block_table import BlockTable
from alignedserve.decode_worker.scheduled_request import ScheduledRequest, scheduled_request
from alignedserve.engine.request import Request
from alignedserve.instance.memory import BlockManager
from alignedserve.instance.prefix_cache import PrefixCache
from alignedserve.instance.requests import adopt
from alignedserve.kv.end_copies import Checkpoint, Cut, EndCopy, Renew, Restore
from alignedserve.kv.held import NO_BLOCK
from alignedserve.protocol.messages import InstanceLimits, Work
from alignedserve.sim.block_contents import BlockContents
from alignedserve.sim.executor import SimEngine
from alignedserve.sim.model import make_request
from alignedserve.timing.deadlines import Deadlines
from alignedserve.types import RequestKey
from tests.sim.islands import COST

_keys = count(1)
BLOCK = 4
MAX_LEN = 24


def limits(num_blocks: int) -> InstanceLimits:
    return InstanceLimits(
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_model_len=MAX_LEN,
    )


class Counts:
    """A table of blocks, in which each call is an iteration of its own."""

    def __init__(self, num_blocks: int = 6, max_parts: int = 4, memory: BlockManager | None = None) -> None:
        of_it = limits(num_blocks)
        self.memory = memory or BlockManager(num_blocks, of_it.span)
        self.memory.count_as(of_it.span, counts_once=True)
        cache = PrefixCache(self.memory, is_enabled=False)
        self.table = BlockTable(of_it, self.memory, cache, max_parts)
        self._number = 0

    def begin(self) -> list[EndCopy]:
        self._number += 1
        self.table.ends.begin(self._number)
        return self.table.ends.ops

    def starts(self, num_tokens: int, is_rt: bool = False, num_cached: int = 0) -> ScheduledRequest:
        """Of a prompt, whose KV is there at once as far as it is cached."""
        self.begin()
        asked = make_request(next(_keys), num_tokens, num_output_tokens=8, arrival_s=0.0)
        work = Work(asked, [], 0, [], Deadlines(is_rt=is_rt))
        request = scheduled_request(work, None, 0, MAX_LEN)
        self.table.start(request)
        self.memory.settle()
        request.num_cached = num_cached
        return request

    def writes(self, request: ScheduledRequest, num_tokens: int) -> list[EndCopy] | None:
        """What is to be done before the request's KV goes up to this token; None if it can't be."""
        ops = self.begin()
        if not self.table.grow(request, num_tokens):
            return None
        self.memory.settle()
        request.num_cached = num_tokens
        request.num_tokens = max(request.num_tokens, num_tokens + 1)
        return ops

    def lent_to(self, borrower: ScheduledRequest) -> list[tuple[RequestKey, int, int]]:
        """The lender of each block that has another owner still, its index there, and the borrower's."""
        loans = self.table.ends._borrowed.get(borrower.key, {})
        for at, loan in loans.items():
            assert borrower.blocks[at] == loan.lender.blocks[loan.index]
        return [(loan.lender.key, loan.index, at) for at, loan in loans.items()]


def test_real_time_fills_what_is_empty_and_then_one_slot_after_the_other() -> None:
    """Best effort has 10 tokens in 3 blocks of 4, and nothing is free."""
    counts = Counts(num_blocks=6)
    be, other = counts.starts(10, num_cached=10), counts.starts(9, num_cached=9)
    assert counts.table.num_free == 0
    rt = counts.starts(3, is_rt=True)
    # The other's last block has three empty slots, and it is lent first.
    assert counts.table.ends.ops == [] and counts.lent_to(rt) == [(other.key, 2, 0)]
    assert counts.writes(rt, 3) == []
    assert counts.writes(rt, 4) == [Checkpoint(other.key, 2, rt.blocks[0], 0, 1)]
    assert other.blocks[2] == NO_BLOCK and counts.lent_to(rt) == []
    # Then the one with two: these are used, and the token that was written last makes way first.
    assert counts.writes(rt, 5) == [] and counts.lent_to(rt) == [(be.key, 2, 1)]
    assert counts.writes(rt, 6) == []
    assert counts.writes(rt, 7) == [Checkpoint(be.key, 2, rt.blocks[1], 1, 2)]
    assert counts.writes(rt, 8) == [Checkpoint(be.key, 2, rt.blocks[1], 0, 1)]
    assert be.blocks[2] == NO_BLOCK and counts.lent_to(rt) == []
    # Of full blocks, those of one that misses tokens anyway, the longest: its last one, and the first ones never.
    assert counts.writes(rt, 9) == [Checkpoint(be.key, 1, rt.blocks[2], 3, 4)]
    assert counts.lent_to(rt) == [(be.key, 1, 2)]
    counts.table.check()


def test_best_effort_goes_on_in_fresh_blocks_when_real_time_has_left() -> None:
    counts = Counts(num_blocks=6)
    be = counts.starts(21, num_cached=21)
    rt = counts.starts(6, is_rt=True)
    ops = counts.writes(rt, 6)
    assert ops is not None
    assert [op for op in ops if isinstance(op, Checkpoint)] == [
        Checkpoint(be.key, 5, rt.blocks[0], 0, 1),
        Checkpoint(be.key, 4, rt.blocks[1], 2, 4),
    ]
    assert counts.writes(be, 22) is None, "two blocks have to be renewed, and none is free"
    counts.table.ended(rt.key)
    # One is real time's no longer, and best effort's alone again.
    assert counts.table.num_free == 1
    assert counts.writes(be, 22) == [
        Renew(be.key, 5, NO_BLOCK, be.blocks[5]),
        Restore(be.key, 5, be.blocks[5], 0, 1),
        Restore(be.key, 4, be.blocks[4], 2, 4),
    ]
    counts.table.ended(be.key)
    assert counts.table.num_free == 6 and counts.table.ends.num_left == 0


def test_best_effort_that_runs_into_real_time_moves() -> None:
    counts = Counts(num_blocks=7)
    be = counts.starts(22, num_cached=22)
    other = counts.starts(4, is_rt=True)
    rt = counts.starts(2, is_rt=True)
    assert counts.writes(rt, 2) == []
    counts.table.ended(other.key)
    # Its tokens and real time's two fill the block.
    assert counts.writes(be, 22) == []
    assert counts.writes(be, 23) == [Renew(be.key, 5, rt.blocks[0], be.blocks[5])]
    assert be.blocks[5] != rt.blocks[0]
    assert counts.table.num_free == 0
    assert counts.writes(rt, 4) == [], "the block is its own"
    counts.table.check()


def test_who_leaves_keeps_the_tokens_before_the_first_that_is_away() -> None:
    counts = Counts(num_blocks=6)
    be = counts.starts(21, num_cached=21)
    rt = counts.starts(6, is_rt=True)
    counts.writes(rt, 6)
    assert counts.table.evict(be.key)
    # Of its fifth block two tokens are away, and two are kept.
    assert (be.num_cached, be.num_blocks) == (18, 5)
    assert counts.writes(rt, 7) is None, "what is being copied is not overwritten"
    assert counts.table.evicted(be.key)
    # The fifth is real time's alone now, as the sixth is.
    assert counts.table.num_free == 4 and counts.writes(rt, 7) == []
    counts.table.check()


def test_a_lender_without_kv_whose_eviction_fails_runs_again_with_its_first_block() -> None:
    counts = Counts(num_blocks=6)
    be, _ = counts.starts(9), counts.starts(10, num_cached=10)
    rt = counts.starts(3, is_rt=True)
    assert counts.table.ends.ops == [] and counts.lent_to(rt) == [(be.key, 2, 0)]
    assert counts.table.evict(be.key) and counts.table.evict_failed(be.key)
    assert be.key in counts.table.running
    assert (be.num_cached, be.num_columns, be.num_blocks, counts.table.num_free) == (0, 1, 1, 1)


def test_no_more_is_lent_than_host_memory_has_room_for() -> None:
    counts = Counts(num_blocks=6, max_parts=2)
    counts.starts(23, num_cached=23)
    rt = counts.starts(7, is_rt=True)
    assert counts.writes(rt, 8) is not None
    assert counts.table.num_lendable == 0 and counts.writes(rt, 9) is None


def test_a_lender_that_runs_in_the_same_iteration_is_left_alone() -> None:
    counts = Counts(num_blocks=6)
    be = counts.starts(21, num_cached=21)
    rt = counts.starts(3, is_rt=True)
    ops = counts.begin()
    be.last_run = counts.table.ends._number
    assert not counts.table.grow(rt, 3) and not ops
    assert counts.writes(rt, 3) == []


class Ends:
    """The counts and a simulated engine do the same, and no request ever runs with another's KV."""

    def __init__(self, rng: Random) -> None:
        num_blocks = rng.randint(6, 12)
        self.rng = rng
        max_parts = rng.randint(1, 8)
        self.engine = SimEngine(limits(num_blocks), COST, Counter())
        self.counts = Counts(num_blocks, max_parts, self.engine.memory)
        self.requests: dict[RequestKey, Request] = {}
        self.running: dict[RequestKey, ScheduledRequest] = {}
        self.leaving: list[RequestKey] = []

    def act(self) -> None:
        """One of these, most often what lets requests go on."""
        acts = [
            self.best_effort_starts,
            self.real_time_starts,
            self.one_leaves,
            self.one_has_left,
            self.one_ends,
        ]
        self.rng.choices([*acts, self.all_run], weights=[2, 3, 0.5, 1, 0.5, 8])[0]()
        self.counts.table.check()

    def best_effort_starts(self) -> None:
        self._start(self.rng.randint(9, 19), is_rt=False)

    def real_time_starts(self) -> None:
        self._start(self.rng.randint(1, 9), is_rt=True)

    def _start(self, num_tokens: int, is_rt: bool) -> None:
        table, needed = self.counts.table, -(-num_tokens // BLOCK)
        if needed > table.num_free + (table.num_lendable if is_rt else 0):
            return
        scheduled = self.counts.starts(num_tokens, is_rt)
        request = adopt(self.engine, scheduled.work, scheduled)
        self.requests[scheduled.key], self.running[scheduled.key] = request, scheduled
        self._carry_out(table.ends.ops)
        self.engine.join(request)

    def _carry_out(self, ops: list[EndCopy]) -> None:
        self.engine.copy_ends([(self.requests[op.key], op) for op in ops])

    def all_run(self) -> None:
        """One after the other, in any order."""
        for key in self.rng.sample(sorted(self.running), len(self.running)):
            self._run(key, self.rng.randint(1, 10))

    def _run(self, key: RequestKey, num_tokens: int) -> None:
        scheduled, request = self.running[key], self.requests[key]
        num_more = min(num_tokens, request.num_pending)
        is_due = num_more == request.num_pending
        num_before = scheduled.num_tokens
        ops = self.counts.writes(scheduled, scheduled.num_cached + num_more)
        if ops is None:
            return
        scheduled.num_tokens = num_before + is_due
        self._carry_out(ops)
        outputs = self.engine.finish(self.engine.launch([(request, num_more)]))
        if any(output.finish_reason for output in outputs):
            self._end(key)

    def one_ends(self) -> None:
        if self.running:
            self._end(self.rng.choice(sorted(self.running)))

    def _end(self, key: RequestKey) -> None:
        self.counts.table.ended(key)
        del self.running[key]
        self.engine.release(self.requests.pop(key))

    def one_leaves(self) -> None:
        able = sorted(key for key, each in self.running.items() if each.num_cached)
        if not able:
            return
        key = self.rng.choice(able)
        scheduled, request = self.running.pop(key), self.requests[key]
        assert self.counts.table.evict(key)
        self.engine.part(request)
        if not scheduled.is_rt:
            self.engine.copy_ends([(request, Cut(key, scheduled.num_cached))])
        self.leaving.append(key)

    def one_has_left(self) -> None:
        if not self.leaving:
            return
        key = self.leaving.pop(0)
        # This looks at all of its KV, which was to be copied until now.
        self.engine.join(self.requests[key])
        if self.rng.random() < 0.3:
            self.running[key] = self.counts.table.leaving[key]
            assert self.counts.table.evict_failed(key)
        else:
            assert self.counts.table.evicted(key)
            self.engine.release(self.requests.pop(key))

    def end(self) -> None:
        for key in [*self.running]:
            self._end(key)
        while self.leaving:
            self.one_has_left()
            for key in [*self.running]:
                self._end(key)
        self.engine.check_idle()
        assert self.counts.table.ends.num_left == 0


@pytest.mark.parametrize("seed", range(60))
def test_whatever_comes_each_runs_with_its_own_kv(seed: int) -> None:
    ends = Ends(Random(seed))
    for _ in range(120):
        ends.act()
    ends.end()


def test_a_wrong_overwrite_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated engine notices if nothing is kept of what is overwritten."""
    monkeypatch.setattr(BlockContents, "save", lambda self, *_: None)
    monkeypatch.setattr(BlockContents, "restore", lambda self, *_: None)
    with pytest.raises(RuntimeError, match="runs with . tokens in its block . of group 0, which holds"):
        for seed in range(60):
            test_whatever_comes_each_runs_with_its_own_kv(seed)


def test_best_effort_lends_all_its_blocks_but_the_first() -> None:
    counts = Counts(num_blocks=6, max_parts=9)
    be, other = counts.starts(10, num_cached=10), counts.starts(9, num_cached=9)
    counts.begin()
    assert counts.table.ends.num_lendable([be, other]) == 4
    rt = counts.starts(16, is_rt=True)
    assert {(lender, index) for lender, index, _ in counts.lent_to(rt)} == {
        (request.key, index) for request in (be, other) for index in (1, 2)
    }
    assert counts.table.ends.num_lendable([be, other]) == 0 and rt.shares
