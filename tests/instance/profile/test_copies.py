"""Copies of real engines' blocks, to memory as a pool has it and from there."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from alignedserve.engine.engine import Engine
from alignedserve.instance.profile.copies import (
    MAX_BYTES,
    CopyBench,
    PoolEnd,
    PullBench,
    measure_channels,
    sizes_of,
)
from alignedserve.instance.profile.make import make
from alignedserve.kv.format import BlockFormat
from alignedserve.kvpool.segment import scratch_blocks
from alignedserve.timing.cost import FREE_COPIES
from alignedserve.timing.estimate import Estimate
from alignedserve.types import BlockId
from tests.engine.helpers import greedy_params, make_engine, run, tokens
from tests.instance.profile.efforts import QUICK, pool_of
from tests.instance.profile.profiles import FACTS
from tests.tiny_models import greedy, prompts
from tests.transport.helpers import leaving_no_thread

Directory = Callable[[str], Path]
FAMILY = "llama-gqa-tied"


@pytest.fixture
def engine(tiny_model: Directory) -> Engine:
    return make_engine(tiny_model(FAMILY), kv_cache_memory_bytes=4 << 20)


@pytest.mark.parametrize("pool_kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("family", [FAMILY, "gemma3"])
def test_each_channel_has_a_rate(tiny_model: Directory, family: str, pool_kv_dtype: str) -> None:
    """Also of columns of several blocks, and where the pool has others."""
    engine = make_engine(tiny_model(family), kv_cache_memory_bytes=4 << 20)
    with leaving_no_thread():
        found = measure_channels(engine, pool_of(engine, pool_kv_dtype), budget_s=0.0)
    channels = found.channels
    for channel in (channels.save, channels.stage, channels.admit, channels.fetch):
        assert 0 < channel.bytes_per_s < math.inf and 0 <= channel.latency_s < 10
    assert channels.stage == channels.fetch and found.note == "admit is a pull by ipc"
    engine.check_idle()


def test_copies_are_free_in_no_profile_that_is_measured(engine: Engine) -> None:
    """An instance goes by this cost model: where copies are free, BROS never waits for KV."""
    cost = make(engine, FACTS, QUICK, pool_of(engine)).cost
    assert not cost.has_free_copies and "admit is a pull by ipc" in cost.source
    free = Estimate(replace(cost, channels=FREE_COPIES))
    assert free.fetch(10_000) < Estimate(cost).fetch(10_000) < math.inf


def test_an_engine_computes_the_same_after_it_and_nothing_is_logged(
    engine: Engine, tiny_model: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    measure_channels(engine, pool_of(engine), budget_s=0.0)
    assert not caplog.records
    assert tokens(run(engine, prompts(), greedy_params())) == greedy(tiny_model(FAMILY))


def test_copies_move_what_is_in_the_blocks(engine: Engine) -> None:
    blocks = [BlockId(block) for block in range(4)]
    memory = np.arange(4 * engine.format.column_bytes).astype(np.uint8).reshape(4, -1)
    bench = CopyBench(engine, engine.format, memory, blocks)
    written = memory.copy()
    assert bench.load(0, 4).num_bytes == memory.nbytes
    memory[:] = 0
    assert bench.save(1, 2).num_bytes == memory.nbytes // 2
    assert np.array_equal(memory[1:3], written[1:3]) and not memory[[0, 3]].any()
    bench.close()
    pulls = PullBench(engine, blocks)
    outcome = pulls.pull(1, 3)
    assert (outcome.what, outcome.num_bytes) == ("pull", 3 * engine.format.column_bytes)
    pulls.close()
    engine.check_idle()


def test_sizes_reach_from_one_column_to_a_bounded_number_of_bytes(tiny_model: Directory) -> None:
    engine = make_engine(tiny_model(FAMILY))
    form = engine.format
    sizes = sizes_of(engine, form)
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] == 1 and len(sizes) > 2
    assert sizes[0] * form.column_bytes <= MAX_BYTES
    huge = BlockFormat(100, form.block_size, 512, 512, "float32")
    assert huge.column_bytes > MAX_BYTES and sizes_of(engine, huge) == [2, 1]


def test_a_cache_of_one_block_is_measured_with_one_size(tiny_model: Directory) -> None:
    engine = make_engine(
        tiny_model(FAMILY),
        max_num_seqs=1,
        max_num_batched_tokens=1,
        max_model_len=16,
        kv_cache_memory_bytes=1 << 20,
    )
    assert sizes_of(engine, engine.format) == [1]
    channels = measure_channels(engine, pool_of(engine), budget_s=0.0).channels
    assert channels.fetch.latency_s == 0 and 0 < channels.fetch.bytes_per_s < math.inf


def test_without_memory_for_the_pool_a_profile_is_made_all_the_same(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    @contextmanager
    def refused(form: BlockFormat, num_blocks: int) -> Iterator[NDArray[np.uint8]]:
        with scratch_blocks(form, 1 << 40) as blocks:
            yield blocks

    cost = make(engine, FACTS, QUICK, PoolEnd(engine.format, refused)).cost
    assert cost.has_free_copies and cost.fastest_tbt_s(16) > 0
    assert "Copies of KV can't be measured" in caplog.text
    assert [each.levelno for each in caplog.records] == [logging.WARNING]
    engine.check_idle()
