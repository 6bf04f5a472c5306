"""The orchestrator with parts that do nothing, and the whole of it on a CPU."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.first import NAMES, PARTS, First, Part, longer_than, unfinished
from benchmarks.gpu.record import is_measured

ROOT = Path(__file__).parents[2]
# The first is long enough for a process to start, and short enough to wait for; the others are for a busy machine.
LIMITS_S = (5.0, 20.0, 80.0)
END_S = 30.0


def part(name: str, *arguments: str, seconds: float = 60.0) -> Part:
    return Part(name, seconds, f"tests.benchmarks.parts.{name}", arguments)


def record(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "first.json").read_text())
    return found


def has_ended(pid: int) -> bool:
    """It may be about to end."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], END_S)[0])
    finally:
        os.close(process)


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_is_recorded_and_the_next_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for limit_s in LIMITS_S:
        out = tmp_path / f"{limit_s:g}"
        first = First(out, [], minutes=5.0)
        look = str(out / "first.json")
        first.run([part("fails"), part("hangs", seconds=limit_s), part("ends", "--look", look)])
        written = record(out)
        if written["parts"][1]["rows"]:
            break

    assert (written["asked"], written["device"]) == (["fails", "hangs", "ends"], "none")
    failed, hung, ended = written["parts"]
    assert (failed["how"], hung["how"], ended["how"]) == ("failed", "stopped", "ended")
    assert failed["words"].endswith("RuntimeError: out of luck") and len(failed["rows"]) == 1
    assert hung["took_s"] >= limit_s
    assert (ended["command"], ended["words"]) == ("a part", "")
    assert ended["rows"] == [
        {"part": "ends", "case": "a", "took_s": 1.5, "before": ["fails", "hangs"], "summary": "as it should"}
    ]
    # It and what it started in a session of its own are gone.
    assert all(has_ended(pid) for pid in hung["rows"][0]["pids"])
    assert [each.is_wrong for each in first.ended] == [True, True, False]

    log = (out / "first.log").read_text()
    assert [line for line in log.splitlines() if line.startswith("====")] == [
        "==== fails",
        "==== hangs",
        "==== ends",
    ]
    assert "RuntimeError: out of luck" in log
    said = capsys.readouterr().out
    assert first.table() in said and "hangs      stopped, " in said


def test_a_part_for_which_no_time_is_left_is_not_begun(tmp_path: Path) -> None:
    First(tmp_path, [], minutes=0.1).run([part("ends")])
    assert [(each["how"], each["took_s"], each["rows"]) for each in record(tmp_path)["parts"]] == [
        ("skipped", 0.0, [])
    ]


def an_end(name: str, how: str = "ended", **row: Any) -> dict[str, Any]:
    return {"part": name, "how": how, "rows": [{"part": name, "case": "a", **row}]}


def a_record(path: Path, *parts: dict[str, Any], **more: Any) -> Path:
    path.write_text(json.dumps({"parts": parts, **more}))
    return path


def test_what_did_not_end_well_is_known(tmp_path: Path) -> None:
    ends = [
        an_end("kernels", num_skipped=1),
        an_end("serves", wrong=["left behind"]),
        an_end("correct", is_equal=False),
        an_end("beside", how="stopped"),
        an_end("steps", skipped=True),
        an_end("int8", error="out of luck"),
        an_end("int4", how="failed"),
        an_end("fp8", how="skipped"),
        an_end("mixture", wrong=[], is_equal=True),
    ]
    bad = ["serves", "correct", "beside", "steps", "int8", "int4", "fp8"]
    assert unfinished(a_record(tmp_path / "a", *ends)) == bad
    # one that was killed did not come to all that was asked for
    asked = [*(each["part"] for each in ends), "window"]
    assert unfinished(a_record(tmp_path / "b", *ends, asked=asked)) == [*bad, "window"]


def first(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu.first", "--tiny", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_again_runs_what_did_not_end_well(tmp_path: Path) -> None:
    before = a_record(
        tmp_path / "before.json",
        an_end("serves"),
        an_end("correct", how="failed"),
        an_end("attention", skipped=True),
    )
    done = first("--again", str(before), "--minutes", "0.1", "--out", str(tmp_path))
    # nothing was wrong: there was no time
    assert done.returncode == 0, done.stderr
    assert [(each["part"], each["how"]) for each in record(tmp_path)["parts"]] == [
        ("correct", "skipped"),
        ("attention", "skipped"),
    ]
    assert done.stdout.startswith("the limits of the parts add up to 2.0 minutes, and there are 0.1:")

    done = first("--again", str(tmp_path / "first.json"), "--minutes", "0.1", "--out", str(tmp_path))
    assert done.returncode == 2 and "would overwrite" in done.stderr


def test_limits_that_do_not_fit_are_said() -> None:
    parts = [part("ends", seconds=90.0), part("fails", seconds=60.0)]
    assert longer_than(parts, minutes=2.5) == ""
    assert "add up to 2.5 minutes, and there are 2.4:" in longer_than(parts, minutes=2.4)
    assert longer_than(PARTS, minutes=8.0)


@pytest.mark.slow
def test_an_unknown_part_is_an_error_that_lists_the_known(tmp_path: Path) -> None:
    done = first("--parts", "steps,stop", "--out", str(tmp_path))
    assert done.returncode == 2 and "part 'stop': must be one of kernels, serves, " in done.stderr


@pytest.mark.slow
@pytest.mark.drawn(one_in=8, turn=6, alone=True)
def test_all_of_it_runs_on_a_cpu(tmp_path: Path) -> None:
    # The limits are those of a GPU. Here they only keep a part that hangs from hanging for ever.
    done = first("--minutes", "30", "--slack", "4", "--out", str(tmp_path))
    parts = {each["part"]: each for each in record(tmp_path)["parts"]}
    log = (tmp_path / "first.log").read_text()
    assert done.returncode == 0, f"{done.stdout[-9000:]}\n{done.stderr[-3000:]}\n{log[-9000:]}"
    assert tuple(parts) == NAMES
    for name, each in parts.items():
        assert each["how"] == "ended" and any(map(is_measured, each["rows"])), name
    cases = {name: [row["case"] for row in each["rows"]] for name, each in parts.items()}
    assert cases["serves"] == ["gloo", "host", "colocated"]
    assert all(row["num_streams"] > 0 and len(row["killed"]) == 2 for row in parts["serves"]["rows"])
    assert cases["beside"] == ["aligned be", "aligned rt", "aligned mix", "aligned worth"]
    assert all(row["num_passed"] > 0 for row in parts["kernels"]["rows"])
