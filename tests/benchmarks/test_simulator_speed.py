"""The simulator's speed is compared with checkouts that lack the command, and other figures than theirs are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.simulator_speed import ROOT, compare

PACKAGE = ROOT / "alignedserve"


def checkout(path: Path, old: str = "", new: str = "") -> Path:
    """Makes a checkout of the package alone: all of it is this one's, but for `sim/world.py` with `new` for `old`."""
    simulator = path / "alignedserve" / "sim"
    simulator.mkdir(parents=True)
    for entry in PACKAGE.iterdir():
        if entry.name != "sim":
            (simulator.parent / entry.name).symlink_to(entry.resolve())
    for entry in (PACKAGE / "sim").glob("*.py"):
        text = entry.read_text()
        if entry.name == "world.py":
            assert old in text
            text = text.replace(old, new)
        (simulator / entry.name).write_text(text)
    return path


@pytest.mark.slow
def test_events_at_other_times_are_other_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = checkout(tmp_path / "same")
    other = checkout(tmp_path / "other", "tick_s: float = 0.05", "tick_s: float = 0.06")
    for path, verdict in ((same, "equal"), (other, "OTHER FIGURES")):
        is_equal = compare(path, ["1 colocated"], ["fcfs"], num_requests=3, rounds=1)
        assert is_equal is (path is same)
        assert capsys.readouterr().out.splitlines()[0].endswith(verdict)
