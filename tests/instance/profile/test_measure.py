"""Profiles of real engines: tiny models, and the demo model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from alignedserve.engine.build import BuiltEngine, build_engine
from alignedserve.engine.config import EngineConfig
from alignedserve.instance.profile.crowd import Crowd
from alignedserve.instance.profile.facts import facts_of
from alignedserve.instance.profile.grid import grid
from alignedserve.instance.profile.make import BRIEF, find_or_make, make
from alignedserve.instance.profile.measure import measure, reach_of
from alignedserve.instance.profile.points import Point
from alignedserve.instance.profile.saved import load
from tests.engine.helpers import greedy_params, run, tokens
from tests.instance.profile.efforts import pool_of
from tests.tiny_models import greedy, prompts

Directory = Callable[[str], Path]
FAMILY = "llama-gqa-tied"


def config_of(directory: Path, **changes: int | str) -> EngineConfig:
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 16 << 20}
    return EngineConfig(str(directory), use_tqdm=False, **{"dtype": "float32"} | sizes | changes)  # type: ignore[arg-type]


@pytest.fixture
def built(tiny_model: Directory) -> BuiltEngine:
    return build_engine(config_of(tiny_model(FAMILY)))


def test_every_point_is_measured_and_nothing_is_left(built: BuiltEngine) -> None:
    engine, shares = built.engine, list[float]()
    points = grid(reach_of(engine))
    measured = measure(engine, points, budget_s=60.0, max_rounds=2, progress=shares.append)
    assert {each.point for each in measured} == set(points)
    assert all(0 < each.seconds < 10 for each in measured)
    assert shares == sorted(shares) and shares[-1] == 1
    engine.check_idle()


def test_an_engine_computes_the_same_after_it(built: BuiltEngine, tiny_model: Directory) -> None:
    """Noise is left in its blocks."""
    measure(built.engine, grid(reach_of(built.engine), is_brief=True), budget_s=60.0, max_rounds=1)
    outputs = run(built.engine, prompts(), greedy_params())
    assert tokens(outputs) == greedy(tiny_model(FAMILY))


def test_when_time_is_short_only_what_a_fit_needs_is_measured(built: BuiltEngine) -> None:
    points = grid(reach_of(built.engine))
    measured = measure(built.engine, points, budget_s=1e-6, max_rounds=5)
    found = [each.point for each in measured]
    assert [point.kind for point in found].count("decode") == 3
    assert [point.kind for point in found].count("chunk") == 3
    for kind in ("decode", "chunk"):
        assert [each for each in found if each.kind == kind] == [
            each for each in points if each.kind == kind
        ][:3]


def test_the_smallest_engine_can_be_profiled(tiny_model: Directory) -> None:
    """One request at a time, one token an iteration."""
    sizes = dict(
        max_num_seqs=1, max_num_batched_tokens=1, max_model_len=32, kv_cache_memory_bytes=3 * 6144 * 2
    )
    built = build_engine(config_of(tiny_model(FAMILY), **sizes))
    facts = facts_of(built, config_of(tiny_model(FAMILY), **sizes))
    profile = make(built.engine, facts, BRIEF, pool_of(built.engine))
    assert profile.cost.fastest_tbt_s(16) > 0
    built.engine.check_idle()


@pytest.mark.parametrize(("max_model_len", "window"), [(64, 24), (24, 0)])
def test_lengths_count_up_to_the_window_of_all_layers(
    tiny_model: Directory, max_model_len: int, window: int
) -> None:
    config = config_of(tiny_model("mistral-window"), max_model_len=max_model_len)
    built = build_engine(config)
    cost = make(built.engine, facts_of(built, config), BRIEF, pool_of(built.engine)).cost
    assert cost.window == window
    assert (cost.fastest_tbt_s(24) == cost.fastest_tbt_s(64)) is bool(window)


def test_a_profile_is_made_once_and_then_found(
    built: BuiltEngine, tiny_model: Directory, tmp_path: Path
) -> None:
    path, facts = tmp_path / "profile.json", facts_of(built, config_of(tiny_model(FAMILY)))
    pool = pool_of(built.engine)
    first = find_or_make(built.engine, facts, path, pool)
    written = path.read_bytes()
    assert find_or_make(built.engine, facts, path, pool) == first
    assert path.read_bytes() == written
    path.write_bytes(written[:100])
    again = find_or_make(built.engine, facts, path, pool)
    assert load(path, facts, reach_of(built.engine)) == again
    assert path.with_name("profile.json.aside-1").read_bytes() == written[:100]


def test_a_profile_whose_copies_could_not_be_measured_is_not_kept(
    built: BuiltEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no room")

    facts, path = {"model": "x", "dtype": "y", "device": "z"}, tmp_path / "profile.json"
    pool = pool_of(built.engine)
    with monkeypatch.context() as patch:
        patch.setattr("alignedserve.instance.profile.make.measure_channels", fails)
        assert find_or_make(built.engine, facts, path, pool).cost.has_free_copies
        assert not path.exists()
    assert not find_or_make(built.engine, facts, path, pool).cost.has_free_copies and path.exists()


def test_where_nothing_can_be_written_it_is_made_each_time(built: BuiltEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    facts, path = {"model": "x", "dtype": "y", "device": "z"}, tmp_path / "file" / "x"
    profile = find_or_make(built.engine, facts, path, pool_of(built.engine))
    assert profile.num_points


def test_facts_tell_apart_what_has_another_pace(built: BuiltEngine, tiny_model: Directory) -> None:
    facts = facts_of(built, config_of(tiny_model(FAMILY)))
    assert facts == facts_of(built, config_of(tiny_model(FAMILY)))
    for directory, changes in (
        (FAMILY, {"dtype": "bfloat16"}),
        (FAMILY, {"attention_backend": "torch"}),
        ("qwen2", {}),
    ):
        config = config_of(tiny_model(directory), **changes)
        assert facts_of(build_engine(config), config) != facts
    assert facts_of(built, config_of(tiny_model(FAMILY)), "int8") == facts | {"pool_kv_dtype": "int8"}


def test_facts_do_not_depend_on_where_the_model_is(tiny_model: Directory, tmp_path: Path) -> None:
    """A hub's name and the directory that it stands for have one profile."""
    elsewhere = tmp_path / "another name"
    elsewhere.symlink_to(tiny_model(FAMILY))
    configs = config_of(tiny_model(FAMILY)), config_of(elsewhere)
    first, other = (facts_of(build_engine(config), config) for config in configs)
    assert first == other


def test_waiting_for_a_core_is_a_share_of_the_time() -> None:
    crowd = Crowd()
    sum(range(100_000))
    assert 0 <= crowd.waited_share <= 1


def test_more_work_is_measured_to_take_longer(built: BuiltEngine) -> None:
    small, large = Point(lengths=(16,)), Point(chunks=((0, 64),))
    found = {each.point: each.seconds for each in measure(built.engine, [small, large], 60.0, 5)}
    assert found[small] < found[large]
