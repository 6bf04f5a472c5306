from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import page, run
from tests.benchmarks.test_gpu_run import tiny_bench

pytest.importorskip("matplotlib")


def measured(out: Path) -> Path:
    bench = tiny_bench(out, models=("llama-3.1-8b",))
    run.run_parts(bench, [(part, 60.0) for part in ("ceilings", "step", "host_cost", "cost_grid")])
    bench.part = "attention"
    for kernel, share in (("balanced", 0.9), ("plain", 0.5)):
        row = {"mix": "1 x 4", "kernel": kernel, "share": share}
        bench.case(f"1 x 4 {kernel}", row.copy)
    bench.part = "moves"
    bench.case("broken", lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    return out / "gpu.json"


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
def test_a_run_becomes_a_page_with_tables_and_pictures(tmp_path: Path) -> None:
    page.write([measured(tmp_path / "run")], tmp_path / "page")
    text = (tmp_path / "page" / "gpu.md").read_text()
    for wanted in ("## A whole decode step", "| llama-3.1-8b | 1 x 64 |"):
        assert wanted in text
    assert "| moves | broken | FAILED ZeroDivisionError: division by zero |" in text
    pictures = {name for name in ("step", "attention") if f"(gpu-{name}.png)" in text}
    assert pictures == {"step", "attention"}
    for name in pictures:
        assert (tmp_path / "page" / f"gpu-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_of_two_runs_the_last_that_did_not_fail_counts(tmp_path: Path) -> None:
    first, second = tiny_bench(tmp_path / "a"), tiny_bench(tmp_path / "b")
    for bench, values in ((first, {"x": 1, "y": 2, "z": None}), (second, {"x": 3, "y": None, "z": None})):
        bench.part = "step"
        for name, value in values.items():
            bench.case(name, lambda value=value: {"value": 1 // bool(value) * value})
    machines, rows = page.merged([tmp_path / "a" / "gpu.json", tmp_path / "b" / "gpu.json"])
    assert len(machines) == 2
    found = {row["case"]: (row.get("value"), row["run"]) for row in rows}
    assert found == {"x": (3, 1), "y": (2, 0), "z": (None, 1)}
