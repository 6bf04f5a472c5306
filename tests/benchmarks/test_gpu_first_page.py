from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.first_page import markdown, rows_of, runs_of, write

pytest.importorskip("matplotlib")

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
HEAD = {
    "date": "2026-01-01T00:00:00Z",
    "command": "python -m benchmarks.gpu.first --out /root/out",
    "commit": "1234567",
    "changed_files": "M a.py",
    "device": "a GPU",
    "num_cpus": 2,
} | dict.fromkeys(("driver", "torch", "triton", "transformers"), "1")


def a_part(name: str, *rows: dict[str, Any], how: str = "ended", words: str = "") -> dict[str, Any]:
    command = f"python -m benchmarks.gpu.{name} --minutes 1 --out /tmp/gpu-1"
    return {"part": name, "took_s": 1.0, "how": how, "words": words, "command": command, "rows": list(rows)}


def a_run(path: Path, *parts: dict[str, Any]) -> Path:
    path.write_text(json.dumps(HEAD | {"parts": parts}))
    return path


def a_chunk(case: str, **more: Any) -> dict[str, Any]:
    return {"part": "chunks", "case": case, **more}


def test_the_page_in_the_repository_is_what_its_figures_make(tmp_path: Path) -> None:
    write([RESULTS / "gpu_first.json"], tmp_path)
    for name in ("gpu_first.json", "gpu_first.md"):
        assert (tmp_path / name).read_text() == (RESULTS / name).read_text()


def test_a_server_that_did_not_get_ready_or_whole_again_has_its_row(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "part": "serves",
            "case": "ipc",
            "wrong": ["it has not got ready"],
            "summary": "it has not got ready",
        },
        {"part": "serves", "case": "host", "wrong": ["not over\n/srv/log"], "killed": {"decode": None}},
    ]
    run = a_run(tmp_path / "first.json", a_part("serves", *rows, how="failed"))
    write([run], tmp_path)
    page = (tmp_path / "gpu_first.md").read_text()
    assert "| ipc |" in page and "decode not again" in page


def test_paths_and_long_texts_are_left_out(tmp_path: Path) -> None:
    failure = ["test_it[1]", "E   assert tensor([0, 0, 0])"]
    kernels = {"part": "kernels", "case": "test_a.py", "passed": 2, "failed": 1, "failures": [failure]}
    broken = a_chunk("a", error='Traceback:\n  File "/srv/x.py"\nRuntimeError: out of luck\n')
    words = 'File "/tmp/site/x.py" import y ModuleNotFoundError: No module named y'
    parts = a_part("kernels", kernels), a_part("steps", broken, how="failed", words=words)
    (run,) = runs_of([a_run(tmp_path / "first.json", *parts)])
    text = json.dumps(run)
    for left_out in ("/tmp", "/root", "/srv", "tensor(", "M a.py"):
        assert left_out not in text
    row = run["parts"][0]["rows"][0]
    assert (row["num_passed"], row["num_failed"], row["failed_tests"]) == (2, 1, ["test_it[1]"])
    assert row["summary"] == "2 passed, 1 failed"
    assert run["parts"][1]["rows"][0]["error"] == "RuntimeError: out of luck"
    assert run["parts"][1]["words"] == "ModuleNotFoundError: No module named y"


def test_the_last_run_that_measured_a_case_counts(tmp_path: Path) -> None:
    one = [
        a_chunk("a", median_s=1),
        a_chunk("b", error="x"),
        a_chunk("c", skipped=True),
        a_chunk("d", median_s=1),
    ]
    two = [
        a_chunk("a", median_s=2),
        a_chunk("b", skipped=True),
        a_chunk("c", error="y"),
        a_chunk("d", error="z"),
    ]
    files = [a_run(tmp_path / name, a_part("steps", *rows)) for name, rows in (("a", one), ("b", two))]
    found = {
        row["case"]: (row["run"], row.get("median_s"), row.get("error")) for row in rows_of(runs_of(files))
    }
    assert found == {"a": (2, 2, None), "b": (1, None, "x"), "c": (2, None, "y"), "d": (1, 1, None)}


def test_keys_read_once_have_a_table(tmp_path: Path) -> None:
    times = {"alone_s": 3e-4, "shared_s": 4e-5, "copied_share": 0.5, "error_of_shared": 1e-3}
    row = {"part": "attention", "case": "64 behind 4,096", **times}
    write([a_run(tmp_path / "first.json", a_part("attention", row))], tmp_path / "page")
    text = (tmp_path / "page" / "gpu_first.md").read_text()
    assert "| 64 behind 4,096 | 300.0 | 40.0 (50.0%) | 1.0e-03 |" in text


def test_aims_that_are_missed_are_said(tmp_path: Path) -> None:
    common = {"model": "m", "before": 0, "roofline_s": 5e-3, "share": 0.5, "aim_ms": 14.0}
    rows = [a_chunk("m 512 tokens", count=512, median_s=13.4e-3, **common)]
    rows.append(a_chunk("m 128 tokens", count=128, median_s=8.6e-3, **common | {"aim_ms": 6.0}))
    rows.append(a_chunk("m 64 tokens", skipped=True, summary="skipped: 1 s left"))
    text = markdown(runs_of([a_run(tmp_path / "a", a_part("steps", *rows))]))
    assert "1 of 2 aims were reached." in text
    assert "| chunk: m 128 tokens (floor 5.0 ms) | 8.6 ms | 6 ms |" in text
    assert "| m | 512 | 0 | 13.4 | 5.0 | 50.0% | 14 | reached |" in text
    assert "| steps | m 64 tokens | skipped: 1 s left | 1 |" in text
