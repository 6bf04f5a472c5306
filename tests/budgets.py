"""How many seconds the folders of tests/ may take in a run: those of tests/budget.toml, times the run's pace.

Tests that run in turn (tests/draws.py) have seconds of their own. Otherwise the others could take them in all runs in
which it is not their turn.

The pace says how much slower than usual the machine is, and is at least 1. It is the larger of two numbers:
- the median of the other folders. It rises on a machine that is slower at everything;
- the time of some fixed work during the run (tests/fixed_work.py). It rises if the processor is slow or shared, which
  slows folders that compute and not those that wait.

Folders that grow together are not excused: they change neither, unless they are half of all.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

BUDGET = Path(__file__).parent / "budget.toml"
# A budget is the usual time of its folder and half of that.
GENEROSITY = 1.5
# A folder with a smaller budget than this, in seconds, says little about the machine's pace.
TELLING_S = 60.0
# Any folder with a budget may take this long, in seconds. A cold import is much of a smaller one.
LEAST_S = 30.0


@dataclass(frozen=True)
class Budget:
    # seconds by the name of a folder
    folders: Mapping[str, float]
    # seconds of the longest turn, by the name of a folder
    turns: Mapping[str, float] = field(default_factory=dict)
    # the usual seconds of the fixed work
    fixed_work_s: float = 1.0

    @classmethod
    def read(cls, path: Path = BUDGET) -> Budget:
        found = tomllib.loads(path.read_text())
        return cls(found["seconds"], found["turns"], found["fixed_work_s"])


@dataclass(frozen=True)
class Taken:
    """What a run took."""

    # seconds by the name of a folder, without tests that run in turn
    folders: Mapping[str, float]
    # seconds and number of the turns that were run, by the name of a folder
    turns: Mapping[str, float] = field(default_factory=dict)
    num_turns: Mapping[str, int] = field(default_factory=dict)
    # the mean seconds of the fixed work; 0 if it was not done
    fixed_work_s: float = 0.0


@dataclass(frozen=True)
class Excess:
    """Tests that took longer than they may."""

    folder: str
    # whether these are its tests that run in turn, or the others
    is_of_turns: bool
    seconds: float
    allowed_s: float

    @property
    def tests(self) -> str:
        return f"tests/{self.folder}{' in turn' if self.is_of_turns else ''}"

    def __str__(self) -> str:
        return (
            f"{self.tests} took {self.seconds:.0f} s and may take {self.allowed_s:.0f}: make it quicker, or "
            "raise its budget in tests/budget.toml and say what the seconds are for"
        )


def pace_of(taken: Taken, budget: Budget, held: str | None = None) -> float:
    """Returns how many times longer than usual this run takes, and at least 1. `held` is the folder that is held to
    its budget. It says nothing about the pace, or one alone would never be over its budget."""
    paces = [
        GENEROSITY * seconds / budget.folders[name]
        for name, seconds in taken.folders.items()
        if name != held and budget.folders.get(name, 0.0) >= TELLING_S
    ]
    return max(1.0, median(paces or [1.0]), taken.fixed_work_s / budget.fixed_work_s)


def excesses(taken: Taken, budget: Budget) -> list[Excess]:
    """Returns the folders that are over their budget; one without a budget may take nothing."""
    allowed = {name: max(seconds, LEAST_S) for name, seconds in budget.folders.items()}
    folders = [
        Excess(name, False, seconds, allowed.get(name, 0.0) * pace_of(taken, budget, held=name))
        for name, seconds in sorted(taken.folders.items())
    ]
    turns = [
        Excess(
            name,
            True,
            seconds,
            budget.turns.get(name, 0.0) * taken.num_turns[name] * pace_of(taken, budget),
        )
        for name, seconds in sorted(taken.turns.items())
    ]
    return [each for each in folders + turns if each.seconds > each.allowed_s]
