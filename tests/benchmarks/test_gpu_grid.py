from __future__ import annotations

from pathlib import Path

import pytest

from alignedserve.instance.profile.points import Point
from benchmarks.gpu import correct, cost_fit, cost_grid
from tests.benchmarks.test_gpu_run import rows, tiny_bench
from tests.instance.profile.profiles import KNOWN, measured_by


def test_the_first_difference_is_named() -> None:
    assert correct.first_difference([[1, 2], [3]], [[1, 2], [3]]) is None
    assert correct.first_difference([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == "prompt 1, token 1: 4 instead of 5"
    assert correct.first_difference([[1]], [[1, 2]]) == "prompt 0: 1 tokens instead of 2"


@pytest.mark.slow
def test_tokens_are_compared_in_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correct, "FAMILIES", ("llama-3.1-8b",))
    bench = tiny_bench(tmp_path, decode_kernels=("balanced",))
    correct.run(bench)
    found = {row["case"].rpartition(" balanced ")[2]: row for row in rows(tmp_path)}
    captured = found.pop("llama-3.1-8b bfloat16 captured")
    assert captured["is_equal"] and captured["max_error"] == 0.0
    assert found.keys() == {"in one go", "in chunks", "preempted"}
    assert all(row["is_equal"] and row["num_tokens"] == 9 * 48 for row in found.values())
    assert found["preempted"]["num_evictions"] > 0
    # an oracle that says the same whatever it is asked could not tell a wrong answer
    expected = correct.reference(tmp_path / "checkpoints" / "llama-3.1-8b")
    assert len({tuple(tokens[:4]) for tokens in expected}) == len(expected)


def test_a_row_is_fitted_and_its_numbers_come_back() -> None:
    points = [Point(each.chunks, each.lengths) for each in cost_grid.points(32768, max_kv_tokens=600_000)]
    rows = [
        {"chunks": [list(chunk) for chunk in each.point.chunks], "lengths": list(each.point.lengths)}
        | {"seconds": each.seconds}
        for each in measured_by(KNOWN, points, 0.0)
    ]
    found = cost_fit.fit_row({"points": rows, "kv_bytes_per_token": 131072}, "made up")
    assert found["num_points"] == len(points) and found["kv_bytes_per_token"] == 131072
    error = found["error_on_held_out"]
    assert max(error["decode_p95"], error["chunk_p95"], error["both_p95"]) < 1e-6
    assert found["decode_attention_s"] == pytest.approx(KNOWN.decode_attention_s)
    assert found["prefill_attention_s"] == pytest.approx(KNOWN.prefill_attention_s)


def test_the_grid_holds_what_fits_and_every_kind() -> None:
    points = cost_grid.points(max_len=2048, max_kv_tokens=110_000)
    assert all(point.num_kv_tokens <= 110_000 for point in points)
    assert all(max(point.lengths, default=0) < 2048 for point in points)
    assert all(before + count <= 2048 for point in points for before, count in point.chunks)
    kinds = {(bool(point.chunks), bool(point.lengths)) for point in points}
    assert kinds == {(True, False), (False, True), (True, True)}


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
def test_the_grid_is_measured(tmp_path: Path) -> None:
    bench = tiny_bench(tmp_path, models=("llama-3.1-8b",))
    cost_grid.run(bench)
    (row,) = rows(tmp_path)
    assert row["points"] and all(point["seconds"] > 0 for point in row["points"])
    assert row["kv_bytes_per_token"] == 2 * 2 * 64 * 4
    assert cost_fit.fit_row(row, "here")["num_points"] == len(row["points"])
