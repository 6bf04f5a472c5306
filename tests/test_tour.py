"""The files of docs/tour.md are there, and are about as long as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/tour.md").read_text()
ROWS = re.findall(r"^\| \[[^\]]+\]\(\.\./([^)]+)\) \| (\d+)(?: of (\d+))? \| (.+) \|$", TEXT, re.MULTILINE)


def num_lines(name: str) -> int:
    return len((ROOT / name).read_text().splitlines())


def test_it_is_as_long_as_it_says() -> None:
    said = re.search(r"twelve files, ([\d,]+) lines", TEXT)
    assert said and len(ROWS) == 12
    read = [int(first) if whole else num_lines(name) for name, first, whole, _ in ROWS]
    assert sum(read) == pytest.approx(int(said[1].replace(",", "")), rel=0.1)


@pytest.mark.parametrize(("name", "first", "whole", "seen"), ROWS, ids=[name for name, *_ in ROWS])
def test_each_file_has_what_to_look_for(name: str, first: str, whole: str, seen: str) -> None:
    """`whole` is empty where the whole file is to be read."""
    assert num_lines(name) == pytest.approx(int(whole or first), rel=0.25, abs=10)
    text = "".join((ROOT / name).read_text().splitlines(keepends=True)[: int(first) if whole else None])
    # `names` of code, not of other files
    assert not [each for each in re.findall(r"`(\w+)`", seen) if each not in text]
