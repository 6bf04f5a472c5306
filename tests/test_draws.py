"""Which cases a run has, by pytest in a process of its own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.draws import commit_of
from tests.inner_pytest import ROOT, run_pytest

pytestmark = pytest.mark.slow

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


MATRIX = """
import pytest

@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("second", range(6))
def test_matrix(first, second):
    print(f"<{first}{second}>")
"""
# Two draws of it are hardly ever the same.
MANY = """
import pytest

@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("case", range(64))
def test_many(case):
    print(f"<{case}>")
"""
# Whoever starts a worker makes a commit before.
COMMITS = """
import subprocess

def pytest_configure_node(node):
    git = ["git", "-C", str(node.config.rootpath), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", f"for {node.gateway.id}"], check=True)
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


def test_a_turn_that_is_due_is_in_each_run(tmp_path: Path) -> None:
    due = TURNS.replace("turn=each", "turn=each, due=each == 2")
    found = {tuple(run(tmp_path, due, "--draw", str(number))) for number in range(8)}
    assert found == {("0", "2"), ("1", "2"), ("2",)}


def test_what_is_named_is_run_whatever_was_drawn(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text(FILE)
    named = str(tmp_path / "tests/test_it.py") + "::test_one"
    for number in range(3):
        code, said = run_pytest(
            tmp_path, {}, "-s", "--draw", str(number), plugins=["tests.draws"], only=named
        )
        assert (code, cases_of(said)) == (0, ["one"]), said


def test_a_share_has_each_value_of_each_parameter(tmp_path: Path) -> None:
    """Also where the share and the number of values have a common divisor."""
    for number in range(4):
        cases = run(tmp_path, MATRIX, "--draw", str(number))
        assert len(cases) == 6
        assert sorted(case[0] for case in cases) == [*"aaabbb"]
        assert sorted(case[1] for case in cases) == [*"012345"]


def names(done: tuple[int, str]) -> list[str]:
    """The cases that passed, in a run with -rp."""
    code, said = done
    assert code == 0, said
    return sorted(re.findall(r"^PASSED .*\[(.*)\]$", said, re.MULTILINE))


@pytest.mark.parametrize("options", [[], ["-n", "2"]], ids=str)
def test_a_run_says_how_to_repeat_its_draw(tmp_path: Path, options: list[str]) -> None:
    plugins = ["tests.draws", "xdist"]
    code, said = run_pytest(tmp_path, {"test_it.py": CASES}, *options, "--draw", "1a2b", plugins=plugins)
    assert code == 0 and "3 passed" in said, said
    assert "draw 1a2b: the same cases again by --draw 1a2b\n" in said


def test_a_few_cases_of_each_function_are_drawn_from_those_that_are_left(tmp_path: Path) -> None:
    text = """
import pytest

@pytest.mark.parametrize("case", [*range(9), *(pytest.param(n, marks=pytest.mark.slow) for n in range(9, 99))])
def test_many(case):
    print(f"<{case}>")

def test_one():
    print("<one>")
"""
    drawn = [run(tmp_path, text, "--draw", number, "--few", "3", "-m", "not slow") for number in "abcdefghi"]
    assert all(len(cases) == 4 and "one" in cases for cases in drawn)
    assert set().union(*drawn) == {"one", *map(str, range(9))}


def test_a_run_that_draws_nothing_names_no_draw(tmp_path: Path) -> None:
    _, said = run_pytest(tmp_path, {"test_it.py": CASES}, "--everything", plugins=["tests.draws"])
    assert "--draw" not in said


def test_a_draw_without_a_commit_says_so(tmp_path: Path) -> None:
    _, said = run_pytest(tmp_path, {"test_it.py": CASES}, plugins=["tests.draws"])
    assert "draw 0 (which each tree without a known commit has): " in said


def test_workers_have_the_draw_of_the_run_though_there_is_a_commit_meanwhile(tmp_path: Path) -> None:
    commit(tmp_path)
    first = commit_of(tmp_path)
    files = {"test_it.py": MANY, "conftest.py": COMMITS}
    plugins = ["tests.draws", "xdist"]
    found = names(run_pytest(tmp_path, files, "-rp", "-n", "2", plugins=plugins))
    assert commit_of(tmp_path) != first
    assert found == names(run_pytest(tmp_path, {}, "-rp", "--draw", first, plugins=plugins))


def commit(repository: Path) -> None:
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("one_in=3, turn=3", "turn=3: must be from 0 to 2 with one_in=3"),
        ("one_in=3, turn=-1", "turn=-1: must be from 0 to 2 with one_in=3"),
        ("one_in=3, alone=True", "alone: needs a turn"),
        ("one_in=3, due=True", "due: needs a turn"),
        ("one_in=0", "one_in=0: must be at least 1"),
        ("one_in=3, turns=1", "unexpected keyword argument 'turns'"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--everything"]], ids=str)
def test_a_mark_that_cannot_be_is_an_error(
    tmp_path: Path, mark: str, message: str, options: list[str]
) -> None:
    text = f"import pytest\n@pytest.mark.drawn({mark})\ndef test_one(): pass"
    code, said = run_pytest(tmp_path, {"test_it.py": text}, *options, plugins=["tests.draws"])
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "test_it.py::test_one: drawn: " in said and message in said


def test_two_files_with_one_turn_alone_are_an_error(tmp_path: Path) -> None:
    """That of this suite is looked at whenever it is collected."""
    text = TURNS.replace("range(3)", "range(2)").replace("turn=each", "turn=each, alone=True")
    for other in (text.replace("one_in=3", "one_in=4"), text.replace("alone=True", "alone=False")):
        files = {"test_it.py": text, "test_other.py": other}
        assert run_pytest(tmp_path, files, plugins=["tests.draws"])[0] in (0, 5)
    for options in ([], ["-n", "1"]):
        files = {"test_other.py": text}
        code, said = run_pytest(tmp_path, files, *options, plugins=["tests.draws", "xdist"])
        assert code not in (0, 5)
        assert "tests/test_it.py, tests/test_other.py: both have turn 0 of 3" in said, said


def test_the_commit_is_what_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit_of(tmp_path) == "0"
    assert int(commit_of(ROOT), 16)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(ROOT) == "0"
