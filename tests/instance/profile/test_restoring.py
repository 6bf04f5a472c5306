"""The cost of restoring KV for a tiny model whose layer inputs can be kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from alignedserve.engine.engine import Engine, LaunchedIteration
from alignedserve.engine.request import Work
from alignedserve.instance.profile.grid import MARGIN, Reach
from alignedserve.instance.profile.make import find_or_make, make
from alignedserve.instance.profile.measure import reach_of
from alignedserve.instance.profile.restoring import (
    RestoringBench,
    lengths_within,
    measure_restoring,
)
from alignedserve.instance.profile.saved import save
from alignedserve.timing.estimate import Estimate
from tests.engine.helpers import greedy_params, make_engine, run, tokens
from tests.instance.profile.efforts import QUICK, pool_of
from tests.instance.profile.profiles import FACTS, KNOWN, REACH, profile_of
from tests.tiny_models import greedy, prompts

Directory = Callable[[str], Path]


@pytest.fixture
def engine(tiny_model: Directory) -> Engine:
    return make_engine(tiny_model("opt"), hidden_cache=True, kv_cache_memory_bytes=8 << 20)


def test_a_profile_has_it_where_inputs_may_be_kept(engine: Engine) -> None:
    cost = make(engine, FACTS, QUICK, pool_of(engine)).cost
    assert cost.restored_token_s > 0
    assert Estimate(cost).restored_token_s == cost.restored_token_s
    engine.check_idle()


def test_one_without_it_is_not_used_where_inputs_may_be_kept(engine: Engine, tmp_path: Path) -> None:
    path, pool = tmp_path / "profile.json", pool_of(engine)
    without = profile_of(FACTS)
    save(path, without)
    again = find_or_make(engine, FACTS, path, pool)
    assert again.cost.restored_token_s > 0
    restoring = replace(without, cost=replace(without.cost, restored_token_s=1e-6))
    for whole in (again, restoring, profile_of(FACTS, has_copies=False)):
        save(path, whole)
        assert find_or_make(engine, FACTS, path, pool) == whole


def test_a_profile_has_none_where_they_are_not(tiny_model: Directory) -> None:
    engine = make_engine(tiny_model("opt"), kv_cache_memory_bytes=4 << 20)
    assert measure_restoring(engine, KNOWN, budget_s=1.0) == 0


@pytest.mark.parametrize(
    "sizes",
    [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 1},
        {"max_model_len": 16, "kv_cache_memory_bytes": 1 << 16},
    ],
    ids=str,
)
def test_where_two_requests_have_no_room_it_is_not_measured(
    tiny_model: Directory, sizes: dict[str, int]
) -> None:
    engine = make_engine(tiny_model("opt"), hidden_cache=True, **({"kv_cache_memory_bytes": 8 << 20} | sizes))
    assert measure_restoring(engine, KNOWN, budget_s=0.0) == KNOWN.restoring(1)
    engine.check_idle()


def test_an_engine_computes_the_same_after_it(engine: Engine, tiny_model: Directory) -> None:
    assert measure_restoring(engine, KNOWN, budget_s=0.0) > 0
    assert tokens(run(engine, prompts(), greedy_params())) == greedy(tiny_model("opt"))


def test_what_is_measured_restores_as_many_tokens_as_it_says(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, steps = engine.launch, list[tuple[bool, int, int]]()

    def noted(work: Work) -> LaunchedIteration:
        ((request, count),) = work
        steps.append((not request.layout.holds_kv, request.num_computed, count))
        return launch(work)

    monkeypatch.setattr(engine, "launch", noted)
    assert RestoringBench(engine).restored(40).num_tokens == 40
    # The prompt, and then decodes of both in turn, of the same lengths.
    assert steps[0] == (True, 0, 40) and len(steps) >= 5
    assert steps[1:] == [(index % 2 == 1, 40 + index // 2, 1) for index in range(len(steps) - 1)]
    engine.check_idle()


def test_two_lengths_have_room_and_time(engine: Engine) -> None:
    reach = reach_of(engine)
    assert lengths_within(reach, KNOWN, budget_s=100.0) == [
        16,
        min(reach.max_chunk, reach.max_model_len - MARGIN),
    ]
    # 10 s of 1 s a token have no room for 64 tokens, which are measured all the same.
    slow = replace(KNOWN, prefill_token_s=1.0, restored_token_s=1e-6)
    assert [lengths_within(REACH, slow, budget_s)[1] for budget_s in (10, 1000, 10_000)] == [64, 256, 2048]
    assert lengths_within(Reach(1, 4, 64, 1000), KNOWN, 1.0) == [4]
    assert lengths_within(Reach(1, 64, MARGIN, 1000), KNOWN, 1.0) == []
