"""No folder has more lines than its budget (tests/lines.toml)."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from benchmarks.house.measures import lines_of_folders
from benchmarks.house.source import product

BUDGETS: dict[str, int] = tomllib.loads((Path(__file__).parent / "lines.toml").read_text())["lines"]
LINES = lines_of_folders(product())


def test_each_folder_has_a_budget() -> None:
    assert BUDGETS.keys() == LINES.keys()


@pytest.mark.parametrize("folder", LINES)
def test_no_folder_exceeds_its_budget(folder: str) -> None:
    assert LINES[folder] <= BUDGETS[folder], (
        f"{folder} has {LINES[folder]} lines, and a budget of {BUDGETS[folder]}. Shorten it, or raise the budget "
        "with an ADR that says what the lines are for."
    )
