"""How much of an iteration's attention is saved where decodes share KV, for a tiny model on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from alignedserve.engine.engine import Engine
from alignedserve.instance.profile.make import make
from alignedserve.instance.profile.sharing import SharingBench, measure_sharing
from tests.engine.helpers import make_engine
from tests.instance.profile.efforts import QUICK, pool_of
from tests.instance.profile.profiles import FACTS, KNOWN

# One block of the tiny OPT.
BLOCK_BYTES = 24576
Directory = Callable[[str], Path]


@pytest.fixture
def engine(tiny_model: Directory) -> Engine:
    return make_engine(tiny_model("opt"), kv_cache_memory_bytes=4 << 20)


def test_a_profile_of_a_cpu_has_it(engine: Engine) -> None:
    assert 0.0 <= make(engine, FACTS, QUICK, pool_of(engine)).cost.shared_saving <= 1.0
    engine.check_idle()


def test_the_requests_of_one_batch_share_all_but_their_last_block(engine: Engine) -> None:
    bench, block_size = SharingBench(engine), engine.format.block_size
    with bench._sharing(3, 4 * block_size) as work:
        tables = [bench._engine.blocks_of(request) for request, _ in work]
        assert tables[0][:4] == tables[1][:4] == tables[2][:4]
        assert len({table[4] for table in tables}) == 3
    engine.check_idle()


@pytest.mark.parametrize(("saved_s", "share"), [(-1.0, 0.0), (0.35, 0.5), (9.0, 1.0)])
def test_it_is_relative_to_reading(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, saved_s: float, share: float
) -> None:
    """Eight requests share tokens that seven of them need not read, at 1 ms each for 100 tokens."""
    found: list[tuple[int, int]] = []

    def saved(bench: SharingBench, num_requests: int, num_shared: int) -> float:
        found.append((num_requests, num_shared))
        return saved_s * num_shared / 1000

    monkeypatch.setattr(SharingBench, "saved_s", saved)
    cost = replace(KNOWN, decode_attention_s=1e-4, decode_far_s=0.0)
    assert measure_sharing(engine, cost, budget_s=0.0) == pytest.approx(share)
    assert [num_requests for num_requests, _ in found] == [8]


@pytest.mark.parametrize(
    "sizes",
    [
        {"max_num_seqs": 1},
        {"max_model_len": 16, "kv_cache_memory_bytes": 1 << 16},
    ],
    ids=str,
)
def test_where_two_requests_have_no_room_nothing_is_saved(
    tiny_model: Directory, sizes: dict[str, int]
) -> None:
    engine = make_engine(tiny_model("opt"), **({"kv_cache_memory_bytes": 4 << 20} | sizes))
    assert measure_sharing(engine, KNOWN, budget_s=0.0) == 0.0


@pytest.mark.parametrize("num_blocks", range(4, 30))
def test_it_takes_no_more_memory_than_there_is(tiny_model: Directory, num_blocks: int) -> None:
    engine = make_engine(tiny_model("opt"), max_model_len=64, kv_cache_memory_bytes=num_blocks * BLOCK_BYTES)
    assert 0.0 <= measure_sharing(engine, KNOWN, budget_s=0.0) <= 1.0
    engine.check_idle()


def test_layers_with_a_window_beside_others_share_nothing_in_profiles(tiny_model: Directory) -> None:
    engine = make_engine(tiny_model("gemma3"), max_model_len=64, kv_cache_memory_bytes=1 << 20)
    assert engine.span.num_groups > 1
    assert measure_sharing(engine, KNOWN, budget_s=0.0) == 0.0
