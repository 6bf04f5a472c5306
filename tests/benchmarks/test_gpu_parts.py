from __future__ import annotations

import json
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from alignedserve.kv.format import BlockFormat
from alignedserve.transport.completions import Done, TransferId
from alignedserve.transport.mover import Mover
from alignedserve.transport.runs import Pairs
from alignedserve.types import RequestKey
from benchmarks.gpu import attention, experts, host_cost, link, moves, quantised, step, throughput, workload
from tests.benchmarks.test_gpu_run import rows, tiny_bench


def test_what_is_exposed_is_what_the_gpu_does_not_cover() -> None:
    assert host_cost.exposed_seconds(5e-3, 4.5e-3) == pytest.approx(0.5e-3)
    assert host_cost.exposed_seconds(5e-3, None) == 5e-3


def test_lengths_are_uniform_and_the_same_for_a_seed() -> None:
    asked = workload.uniform(500, 100, 1024, vocab_size=1000)
    assert asked == workload.uniform(500, 100, 1024, vocab_size=1000)
    assert asked != workload.uniform(500, 100, 1024, vocab_size=1000, seed=1)
    for lengths in (list(map(len, asked.prompts)), asked.num_outputs):
        assert min(lengths) >= 100 and max(lengths) <= 1024
        assert sum(lengths) / 500 == pytest.approx(562, rel=0.06)


def test_rates_count_outputs_and_all_tokens() -> None:
    asked = workload.Asked([[1, 2, 3], [4]], [10, 20])
    found = throughput.rates(asked, 2.0)
    assert (found["output_tokens_per_s"], found["tokens_per_s"]) == (15.0, 17.0)


@pytest.mark.slow
@pytest.mark.drawn(one_in=3)
def test_throughput_is_measured_with_and_without_sampling(tmp_path: Path) -> None:
    bench = tiny_bench(tmp_path, models=("qwen3-0.6b",))
    throughput.run(bench)
    greedy, sampled = rows(tmp_path)
    assert greedy["num_output_tokens"] == sampled["num_output_tokens"] > 0
    assert greedy["first_tokens"] != sampled["first_tokens"]
    assert all(row["output_tokens_per_s"] > 0 for row in (greedy, sampled))


@pytest.mark.slow
def test_common_keys_are_read_once_and_for_each_row(tmp_path: Path) -> None:
    bench = tiny_bench(tmp_path)
    row = attention.measure_shared(bench)
    assert row["error_of_shared"] < 1e-5 and row["shared_s"] > 0 and row["alone_s"] > 0
    # 512 tokens once, and nine of each of three sequences: K and V of two heads of 64 in float32.
    assert row["num_bytes"] == (512 + 27) * 2 * 2 * 64 * 4


def test_common_keys_count_once_in_what_must_not_fit_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = attention.kv_bytes([512 + 27], 2, 64)
    monkeypatch.setattr(attention, "MIN_BYTES", 5 * num_bytes)
    state = attention.Inputs(torch.device("cpu"), [521] * 3, 4, 2, 64, num_common=512)
    # Blocks of 16 tokens.
    assert state.cache.shape[:2] == (32 + 3, 5)
    table = state.step.block_table
    assert (table[:, :32] == table[0, :32]).all() and len(set(table.flatten().tolist())) == 32 + 3


# Tests of the kernel have each scheme every time.
@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize(
    ("model", "quantization", "name", "bytes_per_weight"),
    [
        ("qwen3-30b-a3b", None, "qwen3-30b-a3b", 4),
        ("gpt-oss-20b", None, "gpt-oss-20b mxfp4", 0.5625),
        ("gpt-oss-20b", "fp8", "gpt-oss-20b fp8", 1),
        ("qwen3-30b-a3b", "int4", "qwen3-30b-a3b int4", 0.5625),
    ],
)
def test_experts_are_compared_and_measured_by_the_bytes_that_a_batch_hits(
    tmp_path: Path, model: str, quantization: str | None, name: str, bytes_per_weight: float
) -> None:
    bench = tiny_bench(tmp_path, models=(model,), quantization=quantization)
    bench.part = "experts"
    experts.run(bench)
    measured = [row for row in rows(tmp_path) if row["part"] == "experts" and "rows" in row]
    assert [row["rows"] for row in measured] == [1, 3]
    for row in measured:
        assert row["model"] == name and row["error"] < 1e-5 and row["share"] > 0
        assert all(2 <= num <= min(2 * row["rows"], 8) for num in row["num_hit"])
        assert row["num_bytes"] == pytest.approx(sum(row["num_hit"]) / 2 * 3 * 32 * 64 * bytes_per_weight)


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
def test_layers_in_codes_are_compared_and_measured_beside_bf16(tmp_path: Path) -> None:
    bench = tiny_bench(tmp_path)
    bench.part = "quantised"
    quantised.run(bench)
    measured = {row["case"]: row for row in rows(tmp_path) if "rows" in row}
    ways = ("1 rows", "3 rows", "3 rows in pieces", "70 rows")
    coded = {f"down {form} {way}" for form in quantised.FORMATS for way in ways}
    assert measured.keys() == coded | {f"down bf16 {way}" for way in ways if "pieces" not in way}
    for case, row in measured.items():
        assert row["error"] < 2e-3 and row["share"] > 0 and row["faster"] > 0, case
    assert measured["down int8 1 rows"]["num_bytes"] == 64 * 96 + 4 * 64
    assert measured["down awq 1 rows"]["num_bytes"] == 64 * 96 // 2 + 64 * (4 + 2)


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
def test_a_mixtures_step_is_measured_against_its_own_floor(tmp_path: Path) -> None:
    bench = tiny_bench(tmp_path, models=("qwen3-30b-a3b",))
    bench.part = "step"
    step.run(bench)
    measured = [row for row in rows(tmp_path) if row["part"] == "step" and "batch" in row]
    assert [row["batch"] for row in measured] == [1, 4, 4, 4]
    assert all(row["aim"] == 0.65 and row["share"] > 0 for row in measured)
    assert measured[0]["num_bytes"] < measured[1]["num_bytes"]


def test_scattered_blocks_never_follow_each_other() -> None:
    pairs = moves.scattered(256, seed=0)
    for numbers in ({int(here) for here, _ in pairs}, {int(there) for _, there in pairs}):
        assert numbers == set(range(256))
    merged = sum(b == (a[0] + 1, a[1] + 1) for a, b in pairwise(pairs))
    assert merged <= 1


def test_slow_down_is_of_medians() -> None:
    assert moves.slow_down([1.0, 2.0, 3.0], [2.0, 2.2, 9.0]) == pytest.approx(0.1)


@pytest.mark.slow
def test_moves_are_checked_and_measured_beside_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {1: BlockFormat(1, 16, 1, 64, "float32")}
    monkeypatch.setattr(moves, "FORMATS", small)
    bench = tiny_bench(tmp_path)
    bench.part = "moves"
    moves.run(bench)
    plain, beside = rows(tmp_path)
    assert plain["memory"] == "segment" and plain["save_per_s"] > 0 and plain["load_per_s"] > 0
    assert len(beside["with_s"]) == len(beside["without_s"]) == beside["rounds"] * beside["steps_a_round"]
    assert beside["moved_per_s"] > 0


@pytest.mark.slow
def test_what_did_not_arrive_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Mover.save

    def misplaced(mover: Mover, key: RequestKey, pairs: Pairs, done: Done) -> TransferId:
        there = [there for _, there in pairs]
        return save(
            mover, key, list(zip([here for here, _ in pairs], there[1:] + there[:1], strict=True)), done
        )

    monkeypatch.setattr(Mover, "save", misplaced)
    bench = tiny_bench(tmp_path)
    assert bench.case("broken", moves.plain, bench, BlockFormat(1, 16, 1, 64, "float32")) is None
    assert "what arrived is not what was sent" in json.dumps(rows(tmp_path)[0])


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
def test_what_another_process_lends_is_checked_and_measured(tmp_path: Path) -> None:
    bench = tiny_bench(tmp_path)
    bench.part = "link"
    link.run(bench)
    assert [row["block_bytes"] for row in rows(tmp_path)] == [mib << 20 for mib in (1, 2, 12)]
    assert all(row["is_right"] and row["pull_per_s"] > 0 for row in rows(tmp_path))


def send_others(pipe: Connection, device: str) -> None:
    link.run_sender(pipe, device, seed=1)


@pytest.mark.slow
@pytest.mark.drawn(one_in=3)
def test_other_bytes_than_the_senders_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "run_sender", send_others)
    monkeypatch.setattr(link, "BLOCK_MIB", (1,))
    bench = tiny_bench(tmp_path)
    link.run(bench)
    assert "what arrived is not what was sent" in rows(tmp_path)[0]["error"]


def send_nothing(pipe: Connection, device: str) -> None:
    raise SystemExit(1)


@pytest.mark.slow
@pytest.mark.drawn(one_in=3)
def test_a_sender_that_dies_is_recorded_case_by_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "run_sender", send_nothing)
    bench = tiny_bench(tmp_path)
    link.run(bench)
    assert len(rows(tmp_path)) == 3 and all("error" in row for row in rows(tmp_path))
