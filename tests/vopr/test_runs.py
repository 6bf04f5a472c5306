"""A seed gives one run, regardless of what runs beside it, and faults are noticed."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.engine.outputs import BrokenLogits, TokenOutput
from alignedserve.engine.request import Request
from alignedserve.instance.memory import BlockManager
from alignedserve.instance.prompts import Prompts
from alignedserve.kv.groups import STATE_WINDOW
from alignedserve.kv.held import Held
from alignedserve.kv.span import KvSpan
from alignedserve.kvpool.block_allocator import BlockAllocator, Grant
from alignedserve.router.outbox import OutputCoalescing
from alignedserve.router.replay_diff import compare
from alignedserve.sim.executor import SimEngine
from alignedserve.sim.kv_model import KvModel
from alignedserve.sim.segment import Content, SimSegment, Write
from alignedserve.types import BlockId, PoolBlockId, RequestKey
from alignedserve.vopr.build import make_island
from alignedserve.vopr.clients import DirectClients
from alignedserve.vopr.event_logs import open_in
from alignedserve.vopr.history import AnyAction, Arrive, FlipBit, History
from alignedserve.vopr.runs.run import history_of, log_hash, run
from alignedserve.vopr.runs.shrink import Shrinker
from tests.scheduling import dropping

# Whole histories of seeds that failed once, as these seeds made them then.
EVER_FAILED = sorted((Path(__file__).parent / "seeds").glob("*.json"))
SHRUNK = sorted((Path(__file__).parent / "histories").glob("*.json"))

IN_ALL_LAYERS = {"num_full_groups": 0, "num_sliding_groups": 1}
IN_SOME_LAYERS = {"num_full_groups": 1, "num_sliding_groups": 2}


def short(seed: int, seconds: float = 60.0, **changes: Any) -> History:
    """The beginning of the history of a seed's island."""
    history = history_of(seed, systems=("island",))
    if "window" in changes:
        changes = {"has_state": False} | changes
    plan = replace(history.plan, duration_s=seconds, **changes)
    return History(plan, [action for action in history.actions if action.at_s < seconds])


@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_breaks(seed: int) -> None:
    assert run(short(seed, 100.0)).failure is None


@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("seed", [0, 5, 20, 57])
def test_nothing_breaks_where_bits_of_the_pool_flip(seed: int) -> None:
    history = short(seed, 100.0)
    outcome = run(history)
    assert outcome.failure is None and outcome.happened["flip"] > 3


def test_a_changed_block_that_no_load_finds_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    flip_bit = SimSegment.flip_bit

    def flip_unseen(self: SimSegment, number: int, flaw: int) -> None:
        flip_bit(self, number, flaw)
        self.changed.clear()

    monkeypatch.setattr(SimSegment, "flip_bit", flip_unseen)
    # Whether a seed's blocks are read after a flip depends on when everything happens.
    failures = [str(run(short(seed, 100.0, check_share=1.0)).failure) for seed in (0, 4, 5, 8)]
    assert any("comes from flipped bit" in failure for failure in failures)


def many_flips(count: int) -> Iterator[History]:
    """Islands where prompts begin alike, and loads check some of the pool's blocks: a bit flips every 0.4 s."""
    for seed in itertools.count(3001):
        plain = short(seed, 20.0)
        plan = plain.plan
        if not (plan.begin_alike and plan.enable_prefix_caching and plan.check_share < 1):
            continue
        count -= 1
        dice = random.Random(seed)
        flips = [FlipBit(at_s=0.4 * k, number=dice.randrange(1 << 30)) for k in range(1, 50)]
        arrivals = [each for each in plain.actions if isinstance(each, Arrive)]
        yield History(plan, sorted([*arrivals, *flips], key=lambda each: each.at_s))
        if not count:
            return


def test_what_comes_from_a_changed_block_is_in_use_until_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    check_flaw, seen = KvModel.check_flaw, set[int]()

    def note(self: KvModel, key: RequestKey, flaw: int) -> None:
        seen.add(flaw)
        check_flaw(self, key, flaw)

    monkeypatch.setattr(KvModel, "check_flaw", note)
    assert [run(each).failure for each in many_flips(3)] == [None] * 3 and seen


def with_windows(first_seed: int = 1021) -> Iterator[History]:
    """Islands of models with sliding layers, where prompts begin alike."""
    for seed in itertools.count(first_seed):
        history = short(seed, 30.0)
        if history.plan.window and history.plan.begin_alike and history.plan.num_prefill:
            yield history


def test_columns_with_gaps_that_others_find_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A victim is saved without the blocks that it has passed, and others begin like it."""
    commit = BlockAllocator.commit
    with monkeypatch.context() as patch:
        patch.setattr(
            BlockAllocator, "commit", lambda self, key, num_tokens, first_whole: commit(self, key, num_tokens)
        )
        histories = itertools.islice(with_windows(1401), 20)
        noticed = next((each for each in histories if "which holds" in str(run(each).failure)), None)
    assert noticed and run(noticed).failure is None


def is_noticed() -> bool:
    return any("comes from flipped bit" in str(run(each).failure) for each in many_flips(20))


def test_an_instance_that_forgets_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prompts, "distrust_all", lambda self, era: None)
    assert is_noticed()


def test_a_pool_that_forgets_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockAllocator, "forget_all", lambda self: None)
    assert is_noticed()


def fails_where_changed_kv_gives_nan(monkeypatch: pytest.MonkeyPatch, count: int) -> tuple[list[str], int]:
    """No load checks a block, and each request with KV from a changed one ends with NaN, which its client may see.
    Returns what failed, and the number of these requests."""
    sample, num_broken = SimEngine._sample, 0

    def with_nan(self: SimEngine, request: Request) -> TokenOutput:
        nonlocal num_broken
        if not self._flaws.get(request.request_id):
            return sample(self, request)
        num_broken += 1
        self.part(request)
        return TokenOutput(request.request_id, None, "error", error=BrokenLogits("NaN"))

    monkeypatch.setattr(SimEngine, "_sample", with_nan)
    monkeypatch.setattr(DirectClients, "_ENDS", (*DirectClients._ENDS, "error"))
    histories = (History(replace(each.plan, check_share=0.0), each.actions) for each in many_flips(count))
    return [str(failure) for each in histories if (failure := run(each).failure)], num_broken


def test_no_request_of_a_later_era_has_kv_that_gave_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    failed, num_broken = fails_where_changed_kv_gives_nan(monkeypatch, 5)
    assert not failed and num_broken


def test_kv_that_gave_nan_and_stays_known_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockAllocator, "forget_all", lambda self: None)
    failed, _ = fails_where_changed_kv_gives_nan(monkeypatch, 20)
    assert any("comes from flipped bit" in each for each in failed)


def test_blocks_that_have_changed_are_right_once_they_are_saved_again() -> None:
    island, _ = make_island(short(0).plan)
    segment, content = island.pool.segment, Content(RequestKey(1), 0, 4)
    segment.flip_bit(5, flaw=1)
    assert not segment.changed
    for save in range(2):
        segment.write([(PoolBlockId(3), content)]).finish()
        assert not segment.changed and segment.contents[PoolBlockId(3)] == content, save
        segment.flip_bit(5, flaw=1)
        assert segment.changed == {3} and segment.contents[PoolBlockId(3)] != content
        segment.flip_bit(5, flaw=2)
        assert segment.contents[PoolBlockId(3)].flaw == 1


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("seed", [20, 153])
def test_nothing_breaks_where_blocks_are_shared_from_both_ends(seed: int) -> None:
    history = history_of(seed, policies=("bros",), systems=("island",))
    assert history.plan.share_blocks and run(history).failure is None


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize(("seed", "window"), [(5, 30), (11, 100), (18, 1), (20, 150)])
def test_nothing_breaks_where_requests_hold_the_blocks_of_a_window(seed: int, window: int) -> None:
    assert run(short(seed, 100.0, window=window, **IN_ALL_LAYERS)).failure is None


@pytest.mark.parametrize("has_state", [False, True])
def test_all_of_an_island_pass_a_window_in_the_same_steps(has_state: bool) -> None:
    island, _ = make_island(replace(short(5).plan, window=30, tile_tokens=4, has_state=has_state))
    instances = (*island.prefills, *island.decodes, *island.colocated)
    limits = [island.pool._limits, *(each._limits for each in instances)]
    assert {(each.window, each.tile_tokens, each.has_state) for each in limits} == {(30, 4, has_state)}


@pytest.mark.slow
@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize(
    ("seed", "window", "num_full", "num_sliding"),
    [(5, 30, 1, 1), (11, 100, 2, 3), (18, 1, 1, 3), (20, 150, 1, 1), (9, 30, 2, 3)],
)
def test_nothing_breaks_where_only_some_layers_have_the_window(
    seed: int, window: int, num_full: int, num_sliding: int
) -> None:
    groups = {"num_full_groups": num_full, "num_sliding_groups": num_sliding}
    assert run(short(seed, 100.0, window=window, **groups)).failure is None


def short_with_states(seed: int, **groups: int) -> History:
    needs_kv = {"share_blocks": False, "hidden_cache": False}
    return short(seed, 100.0, window=STATE_WINDOW, tile_tokens=1, has_state=True, **needs_kv, **groups)


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("groups", [IN_ALL_LAYERS, IN_SOME_LAYERS], ids=["all layers", "some do"])
@pytest.mark.parametrize("seed", [10, 38, 39, 48])
def test_nothing_breaks_where_layers_have_a_state(seed: int, groups: dict[str, int]) -> None:
    assert run(short_with_states(seed, **groups)).failure is None


@pytest.mark.slow
@pytest.mark.parametrize("groups", [IN_ALL_LAYERS, IN_SOME_LAYERS], ids=["all layers", "some do"])
@pytest.mark.parametrize("seed", [38, 48])
def test_a_state_that_later_tokens_have_changed_is_noticed(
    seed: int, groups: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_usable = KvSpan.num_usable

    def of_a_window(self: KvSpan, num_saved: int, num_tokens: int) -> int:
        return num_usable(dataclasses.replace(self, has_state=False), num_saved, num_tokens)

    monkeypatch.setattr(KvSpan, "num_usable", of_a_window)
    assert "runs with" in failing(short_with_states(seed, **groups))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "groups", "message"),
    [(10, IN_ALL_LAYERS, "reads"), (10, IN_SOME_LAYERS, "reads"), (39, IN_ALL_LAYERS, "runs with")],
    ids=["torn in all layers", "torn in some", "of later tokens"],
)
def test_a_state_that_was_replaced_by_one_the_router_does_not_know_of_is_noticed(
    seed: int, groups: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KvSpan, "num_lasting", lambda self, num_saved: num_saved)
    assert message in failing(short_with_states(seed, **groups))


@pytest.mark.parametrize("groups", [IN_ALL_LAYERS, IN_SOME_LAYERS], ids=["all layers slide", "some do"])
def test_a_block_that_is_freed_too_soon_is_noticed(
    groups: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_passed = KvSpan.num_passed
    monkeypatch.setattr(KvSpan, "num_passed", lambda self, count: num_passed(self, count + 20))
    failure = run(short(5, 100.0, window=100, tile_tokens=1, **groups)).failure
    assert failure and "holds None" in failure.message


@pytest.mark.slow
def test_a_copy_that_passes_layers_which_attend_to_all_tokens_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def passing_all(self: KvSpan, first: int, end: int, num_passed: int) -> list[bool]:
        return [column >= num_passed for column in range(first, end) for _ in range(self.num_groups)]

    monkeypatch.setattr(KvSpan, "are_held", passing_all)
    assert "group 0, which holds None" in failing(short(5, 100.0, window=30, **IN_SOME_LAYERS))


@pytest.mark.slow
def test_layers_that_take_each_others_kv_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = BlockManager.in_columns

    def swapped(self: BlockManager, owner: Held, first: int, end: int) -> list[BlockId]:
        blocks = plain(self, owner, first, end)
        # Of each column the first two.
        for column in range(0, len(blocks), 3):
            blocks[column : column + 2] = reversed(blocks[column : column + 2])
        return blocks

    history = short(5, 100.0, window=150, num_full_groups=2, num_sliding_groups=1)
    assert run(history).failure is None
    monkeypatch.setattr(BlockManager, "in_columns", swapped)
    assert "of 3 groups is to hold Content" in failing(history)


@pytest.mark.drawn(one_in=3)
@pytest.mark.slow
@pytest.mark.parametrize("path", EVER_FAILED, ids=lambda path: path.stem)
def test_what_broke_once_does_not_break(path: Path) -> None:
    assert run(History.load(path)).failure is None


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("path", SHRUNK, ids=lambda path: path.stem)
def test_what_was_shrunk_does_not_break(path: Path) -> None:
    assert run(History.load(path)).failure is None


def test_the_same_seed_is_the_same_run() -> None:
    assert log_hash(short(3)) == log_hash(short(3)) != log_hash(short(4))


@pytest.mark.parametrize("seed", [60, 67, 70, pytest.param(64, marks=pytest.mark.drawn(one_in=2))])
def test_what_is_dropped_at_any_time_breaks_nothing(seed: int) -> None:
    """Requests leave without their KV, while processes die and copies fail."""
    changes = {
        "policy": dropping.NAME,
        "preemption_mode": "swap",
        "share_blocks": False,
        "hidden_cache": False,
    }
    assert run(short(seed, 100.0, **changes)).failure is None


@pytest.mark.slow
def test_the_log_of_a_run_replays(tmp_path: Path) -> None:
    assert run(short(5), open_in(tmp_path, "five")).num_requests
    logs = list(tmp_path.glob("five-router-*.events"))
    assert logs and all(compare(log).divergence is None for log in logs)


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    history = short(6)
    history.save(tmp_path / "six.json")
    assert History.load(tmp_path / "six.json") == history
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a history"):
        History.load(tmp_path / "no.json")


# ---- what breaks is noticed ------------------------------------------------------------------------------------------

# A quiet plan in which much is copied.
QUIET: dict[str, Any] = {
    "num_prefill": 1,
    "num_decode": 1,
    "num_colocated": 0,
    "link": "host",
    "policy": "fcfs",
}


def failing(history: History) -> str:
    failure = run(history).failure
    assert failure
    return str(failure)


def test_kv_of_other_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Write.finish

    def broken(write: Write) -> None:
        write._places = [(block, held._replace(digest=1)) for block, held in write._places]
        finish(write)

    assert run(short(0, **QUIET)).failure is None
    monkeypatch.setattr(Write, "finish", broken)
    assert "has KV of other tokens" in failing(short(0, **QUIET))


def test_a_block_with_two_owners_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = BlockAllocator.reserve

    def broken(self: BlockAllocator, *args: Any) -> Grant | None:
        grant = reserve(self, *args)
        if grant and len(grant.blocks) > 1:
            return Grant([grant.blocks[0], *([grant.blocks[0]] * (len(grant.blocks) - 1))], grant.dropped)
        return grant

    monkeypatch.setattr(BlockAllocator, "reserve", broken)
    assert failing(short(0, **QUIET))


def test_a_lost_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    add, num_added = OutputCoalescing.add, [0]

    def broken(self: OutputCoalescing, *args: Any) -> None:
        num_added[0] += 1
        if num_added[0] != 20:
            add(self, *args)

    monkeypatch.setattr(OutputCoalescing, "add", broken)
    assert failing(short(0, **QUIET))


def test_a_request_that_waits_for_ever_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.router.dispatch.PrefillDispatch.start", lambda self: None)
    assert "are open" in failing(short(0, **QUIET))


# ---- shrinking -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_failure_is_shrunk_to_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the core fails when it hears of a request with a key that ends with 7."""
    from alignedserve.router.intake import Submissions

    submit = Submissions.submit

    def broken(self: Submissions, gateway: Any, message: Any) -> None:
        if message.request.key % 10 == 7:
            raise RuntimeError(f"request {message.request.key} is one too many")
        submit(self, gateway, message)

    monkeypatch.setattr(Submissions, "submit", broken)
    history = short(0, **QUIET)
    assert len(history.actions) > 10
    shrinker = Shrinker(history)
    assert [action.key for action in shrinker.shrink().actions if hasattr(action, "key")] == [7]
    assert len(shrinker.history.actions) == 1
    # The first run is needed to know the failure, and there is time for no other.
    assert Shrinker(history, max_s=0.0).shrink() == history


def test_an_owner_may_be_refused_from_half_of_the_queue_on() -> None:
    plain = short(0, 20.0, **QUIET)
    most = make_island(plain.plan)[0].config.router.max_num_queued_reqs
    one = Arrive(
        at_s=1.0,
        key=RequestKey(0),
        gateway=plain.plan.ids_of("gateway")[0],
        family=0,
        num_shared=0,
        prompt_len=1,
        output_len=1,
        owner="a",
    )
    crowd: list[AnyAction] = [replace(one, key=RequestKey(n)) for n in range(most // 2 + 1)]
    outcome = run(History(plain.plan, crowd))
    assert outcome.failure is None
    assert outcome.ends["owner_full"] == 1 and outcome.ends["length"] + outcome.ends["stop"] == len(crowd) - 1


def test_what_does_not_fail_is_not_shrunk() -> None:
    with pytest.raises(ValueError, match="does not fail"):
        Shrinker(short(0, 10.0))
