"""The files of docs/tour.md are there, and are about as long as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/tour.md").read_text()
ROWS = re.findall(r"^\| \[[^\]]+\]\(\.\./([^)]+)\) \| (\d+) \| (.+) \|$", TEXT, re.MULTILINE)


def num_lines(name: str) -> int:
    return len((ROOT / name).read_text().splitlines())


def test_it_is_as_long_as_it_says() -> None:
    said = re.search(r"twelve files, ([\d,]+) lines", TEXT)
    assert said and len(ROWS) == 12
    assert sum(num_lines(name) for name, _, _ in ROWS) == pytest.approx(
        int(said[1].replace(",", "")), rel=0.1
    )


@pytest.mark.parametrize(("name", "said", "seen"), ROWS, ids=[name for name, _, _ in ROWS])
def test_each_file_has_what_to_look_for(name: str, said: str, seen: str) -> None:
    assert num_lines(name) == pytest.approx(int(said), rel=0.25, abs=10)
    text = (ROOT / name).read_text()
    # `names` of code, not of other files
    assert not [each for each in re.findall(r"`(\w+)`", seen) if each not in text]
