"""The whole way through, on a CPU, with models of no weight."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import ceilings, run, step
from benchmarks.gpu.bench import Bench, Options
from benchmarks.gpu.record import Row


def tiny_bench(out: Path, minutes: float = 5.0, **options: Any) -> Bench:
    chosen = Options(backend="torch", is_tiny=True, **options)
    return run.make_bench(out, torch.device("cpu"), chosen, minutes)


def rows(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((out / "gpu.json").read_text())["rows"]
    return found


@pytest.mark.slow
def test_one_call_measures_writes_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.main(
        f"--tiny --device cpu --backend torch --out {tmp_path} --models llama-3.1-8b"
        " --parts ceilings,step,host_cost".split()
    )
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert {"device", "date", "command", "commit", "torch"} <= written.keys()
    by_part = {
        part: [row for row in written["rows"] if row["part"] == part] for part in ("step", "host_cost")
    }
    assert [row["batch"] for row in by_part["step"]] == [1, 4, 4, 4]
    for row in by_part["step"]:
        assert row["share"] == pytest.approx(row["roofline_s"] / row["median_s"])
        assert 0 < row["share"] < 1
    assert all(row["exposed_s"] > 0 for row in by_part["host_cost"])
    table = capsys.readouterr().out.rpartition("\n\n")[2]
    assert len(table.splitlines()) == 1 + len(written["rows"])


@pytest.mark.slow
def test_a_part_or_case_that_fails_is_recorded_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of luck")

    bench = tiny_bench(tmp_path)
    monkeypatch.setattr(ceilings, "_read", broken)
    monkeypatch.setattr(step, "engine_for", broken)
    run.run_parts(bench, [("step", 60.0), ("ceilings", 60.0)])
    failed = [row for row in rows(tmp_path) if "error" in row]
    models = ["llama-3.1-8b", "opt-13b", "qwen3-30b-a3b", "gemma-3-4b"]
    assert [row["case"] for row in failed] == [*models, "read_bytes_per_s"]
    assert all("out of luck" in row["error"] and "Traceback" in row["error"] for row in failed)
    assert rows(tmp_path)[-1]["case"] == "narrow_fp16_per_s"
    assert "FAILED RuntimeError: out of luck" in bench.record.table()


def test_without_time_nothing_is_begun_and_that_is_said(tmp_path: Path) -> None:
    bench = tiny_bench(tmp_path, minutes=0.1)
    run.run_parts(bench, [("ceilings", 60.0), ("step", 60.0)])
    assert [(row["part"], row["skipped"]) for row in rows(tmp_path)] == [("ceilings", True), ("step", True)]


def test_every_case_is_on_disk_before_the_next_begins(tmp_path: Path) -> None:
    bench = tiny_bench(tmp_path)
    seen: list[int] = []

    def measured() -> Row:
        seen.append(len(bench.record.rows))
        return {"value": 1}

    for number in range(3):
        bench.case(f"case {number}", measured)
        assert len(rows(tmp_path)) == number + 1
    assert seen == [0, 1, 2]


def test_an_unknown_part_is_an_error_that_lists_the_known() -> None:
    assert run.parse_parts("ceilings, step:33") == [("ceilings", 30.0), ("step", 33.0)]
    with pytest.raises(argparse.ArgumentTypeError, match="part 'stop': must be one of ceilings, "):
        run.parse_parts("stop")
