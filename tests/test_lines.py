"""No folder has more lines than its budget (tests/lines.toml), or far fewer."""

from __future__ import annotations

from benchmarks.house.measures import lines_of_folders
from benchmarks.house.ratchet import LINES, faults, read
from benchmarks.house.source import product


def test_each_folder_has_a_budget_and_keeps_it() -> None:
    assert not list(faults(lines_of_folders(product()), read(LINES)))
