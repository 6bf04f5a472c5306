"""Which cases a run has, by pytest in a process of its own."""

from __future__ import annotations

import re
from pathlib import Path

from tests.draws import commit_of
from tests.inner_pytest import ROOT, run_pytest

CASES = """
import pytest

@pytest.mark.parametrize(
    "case", ["always", *(pytest.param(each, marks=pytest.mark.drawn(one_in=4)) for each in range(8))]
)
def test_cases(case):
    print(f"<{case}>")
"""
FILE = """
import pytest

pytestmark = pytest.mark.drawn(one_in=3, whole=True)

def test_one():
    print("<one>")

def test_two():
    print("<two>")
"""
TURNS = """
import pytest

@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=pytest.mark.drawn(one_in=3, turn=each)) for each in range(3)]
)
def test_turns(case):
    print(f"<{case}>")
"""


def cases_of(said: str) -> list[str]:
    return re.findall("<([a-z0-9]+)>", said)


def run(root: Path, text: str, *options: str) -> list[str]:
    code, said = run_pytest(root, {"test_it.py": text}, "-s", *options, plugins=["tests.draws"])
    assert code in (0, 5), said
    return cases_of(said)


def test_each_run_has_its_share_of_the_cases_and_some_runs_together_all(tmp_path: Path) -> None:
    drawn = [run(tmp_path, CASES, "--draw", number) for number in ("a", "b", "a", "0c", "d")]
    assert all("always" in each and len(each) == 3 for each in drawn)
    assert drawn[0] == drawn[2]
    assert len({tuple(each) for each in drawn}) > 1
    assert run(tmp_path, CASES, "--everything") == ["always", *map(str, range(8))]


def test_a_whole_file_is_drawn_or_none_of_it(tmp_path: Path) -> None:
    found = {tuple(run(tmp_path, FILE, "--draw", str(number))) for number in range(6)}
    assert found == {(), ("one", "two")}


def test_each_run_is_the_turn_of_one(tmp_path: Path) -> None:
    found = [tuple(run(tmp_path, TURNS, "--draw", str(number))) for number in range(8)]
    assert set(found) == {("0",), ("1",), ("2",)}


def test_what_is_named_is_run_whatever_was_drawn(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text(FILE)
    named = str(tmp_path / "tests/test_it.py") + "::test_one"
    for number in range(3):
        code, said = run_pytest(
            tmp_path, {}, "-s", "--draw", str(number), plugins=["tests.draws"], only=named
        )
        assert (code, cases_of(said)) == (0, ["one"]), said


def test_workers_draw_what_the_run_draws_and_it_says_how_to_repeat_that(tmp_path: Path) -> None:
    code, said = run_pytest(
        tmp_path, {"test_it.py": CASES}, "-n", "2", "--draw", "1a2b", plugins=["tests.draws", "xdist"]
    )
    assert code == 0 and "3 passed" in said, said
    assert (
        "--draw 1a2b"
        in run_pytest(tmp_path, {"test_it.py": CASES}, "--draw", "1a2b", plugins=["tests.draws"])[1]
    )


def test_the_commit_is_what_draws(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == "0"
    assert int(commit_of(ROOT), 16)
