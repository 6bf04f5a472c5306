"""Random mutants are as described, and caught mutants are distinguished from survivors."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.mutants import copies
from benchmarks.mutants.areas import AREAS, area_of, files_of
from benchmarks.mutants.catch import Bounds, Verdict, attempt, attempt_imported, ordered
from benchmarks.mutants.changes import changes, is_different
from benchmarks.mutants.copies import CollectedTests, copy_tree
from benchmarks.mutants.draw import draw
from benchmarks.mutants.edit import Edit
from benchmarks.mutants.live import apart, caught_live, run_in, together
from benchmarks.mutants.mutant import ROOT, Mutant, mutants
from benchmarks.mutants.named import edit_of
from benchmarks.mutants.reach import VOPR, Measured, Reach, digest_of, load, measure
from benchmarks.mutants.swap import Functions, Probes
from benchmarks.mutants.table import page, remarks, save, saved

LIMIT = '''
"""How much is taken."""
import logging

logger = logging.getLogger(__name__)
MOST = 8


class Limit:
    def __init__(self, most: int = MOST) -> None:
        self.num_taken = 0
        self.most = most

    def __repr__(self) -> str:
        return "Limit" + str(self.num_taken + 1)

    def take(self, num: int) -> bool:
        """Returns whether there is room."""
        assert num > 0
        if self.num_taken + num > self.most:
            logger.warning("%s is more than %s", num + 1, self.most)
            return False
        self.num_taken += num
        return True

    def check(self) -> None:
        if self.num_taken < 0 and not self.most:
            raise ValueError("less than nothing: " + str(self.num_taken - 1))

    def unlooked(self) -> int:
        return max(
            self.num_taken,
            self.most,
        )

    def is_full(self) -> bool:
        return self.num_taken >= self.most


def unlooked(value: str) -> str:
    return value
'''
FILE = "alignedserve/batch/limit.py"


def changed(function: str, text: str = LIMIT) -> dict[tuple[str, str], Edit]:
    return {(each.old, each.new): each for each in changes(FILE, text) if each.function == function}


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def test_each_change_is_of_one_place_and_leaves_the_lines_where_they_are() -> None:
    found = changes(FILE, LIMIT)
    assert len(found) > 15
    for edit in found:
        new = edit.applied(LIMIT)
        compile(new, FILE, "exec")
        assert is_different(LIMIT, edit)
        differing = [a for a, b in zip(LIMIT.split("\n"), new.split("\n"), strict=True) if a != b]
        assert 1 <= len(differing) <= 4


def test_what_a_program_decides_by_is_changed() -> None:
    assert {
        ("self.num_taken + num > self.most", "self.num_taken + num >= self.most"),
        ("self.num_taken + num > self.most", "not self.num_taken + num > self.most"),
        ("self.num_taken + num", "self.num_taken - num"),
        ("self.num_taken += num", "pass"),
        ("self.num_taken += num", "self.num_taken -= num"),
        ("False", "True"),
    } <= set(changed("Limit.take"))
    both = changed("Limit.check")
    assert ("not self.most", "self.most") in both
    assert ("self.num_taken < 0 and (not self.most)", "self.num_taken < 0") in both
    assert ("max(self.num_taken, self.most)", "min(self.num_taken, self.most)") in changed("Limit.unlooked")


@pytest.mark.parametrize("told", ["logger", "num + 1", "num > 0", "__repr__", "MOST", "num_taken - 1"])
def test_what_is_only_told_is_not_changed(told: str) -> None:
    """An error may be left out, but not say something else."""
    found = [each for each in changes(FILE, LIMIT) if told in each.old or told in each.function]
    assert all(each.old.startswith("raise ") and each.new == "pass" for each in found)


def test_a_key_stays_where_other_functions_change() -> None:
    moved = LIMIT.replace("MOST = 8", "MOST = 8\n\n\ndef other(x: int) -> int:\n    return x + 1\n")
    before, after = changed("Limit.take"), changed("Limit.take", moved)
    assert [each.key for each in before.values()] == [each.key for each in after.values()]
    num_lines = moved.count("\n") - LIMIT.count("\n")
    assert [each.line + num_lines for each in before.values()] == [each.line for each in after.values()]


@pytest.mark.slow
def test_keys_tell_all_changes_of_the_code_apart() -> None:
    for area in AREAS:
        found = [each for file in files_of(area, ROOT) for each in changes(file, (ROOT / file).read_text())]
        assert len(found) > 500
        assert len({each.key for each in found}) == len(found)


@pytest.mark.slow
def test_a_seed_draws_as_many_of_each_area_and_the_same_again() -> None:
    drawn = draw(ROOT, 20, seed=1)
    assert drawn == draw(ROOT, 20, seed=1) != draw(ROOT, 20, seed=2)
    assert [area_of(each.file) for each in drawn] == [
        area for at, area in enumerate(AREAS) for _ in range(2 + (at < 4))
    ]
    assert len({(each.file, each.statement_line) for each in drawn}) == 20


def test_what_is_drawn_hangs_on_its_own_function(tmp_path: Path) -> None:
    (tmp_path / "alignedserve/batch").mkdir(parents=True)
    path = tmp_path / FILE
    path.write_text(LIMIT)
    before = {each.key for each in draw(tmp_path, 8 * 6, seed=3)}
    path.write_text(
        LIMIT.replace("def unlooked(self) -> int:", "def unlooked(self) -> int:\n        print()")
    )
    after = {each.key for each in draw(tmp_path, 8 * 6, seed=3)}
    assert len(before) == len(after) == 6
    assert len(before & after) >= 5


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_a_named_mutant_is_the_same_change(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    edit = edit_of(mutant, text)
    # but for empty lines in the place of those that are left out
    changed, wanted = (each.split("\n") for each in (edit.applied(text), mutant.applied(text)))
    assert [line for line in changed if line] == [line for line in wanted if line]
    assert text.split("\n")[edit.statement_line - 1].strip()


# ---- code that is put into functions ---------------------------------------------------------------------------------


@pytest.fixture
def limit(tmp_path: Path) -> Iterator[ModuleType]:
    """The module, imported from a tree of its own."""
    path = tmp_path / FILE
    path.parent.mkdir(parents=True)
    path.write_text(LIMIT)
    spec = importlib.util.spec_from_file_location("limit_of_a_test", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


def test_functions_that_are_imported_get_the_mutants_code(limit: ModuleType, tmp_path: Path) -> None:
    functions, one = Functions(tmp_path), limit.Limit(3)
    assert one.take(3) and not one.take(1)
    edit = changed("Limit.take")["self.num_taken + num > self.most", "self.num_taken + num <= self.most"]
    assert functions.replace(FILE, edit.applied(LIMIT)) == 1
    assert one.take(1)
    assert functions.replace(FILE, LIMIT) == 1
    assert not one.take(1)


def test_what_stands_outside_functions_is_not_put_into_any(limit: ModuleType, tmp_path: Path) -> None:
    assert Functions(tmp_path).replace(FILE, LIMIT.replace("MOST = 8", "MOST = 9")) == 0


def test_probes_say_which_statements_are_executed(limit: ModuleType, tmp_path: Path) -> None:
    probes = Probes(Functions(tmp_path), tmp_path, [FILE])
    lines = LIMIT.split("\n")

    def executed() -> list[str]:
        return [lines[probes.places[at][1] - 1].strip() for at in probes.take()]

    one = limit.Limit(3)
    assert executed() == ["self.num_taken = 0", "self.most = most"]
    assert one.take(2)
    assert executed() == [
        "assert num > 0",
        "if self.num_taken + num > self.most:",
        "self.num_taken += num",
        "return True",
    ]
    assert not one.take(2) and "return False" in executed()
    assert executed() == []


# ---- what catches them -----------------------------------------------------------------------------------------------

TESTS = """
import os
import subprocess
import sys
from pathlib import Path

import pytest

from alignedserve.batch.limit import Limit

@pytest.fixture(scope="module")
def kept():
    one = Limit(3)
    one.is_full()
    made = Path(f"made-by-{os.getpid()}")
    made.touch()
    yield one
    made.unlink()

def test_as_many_as_there_are() -> None:
    one = Limit(3)
    assert one.take(3) and not one.take(1)

def test_nothing_is_wrong() -> None:
    Limit(3).check()
    assert Limit().most == 8
    assert not os.path.exists("busy")

def test_a_process_returns_what_it_is_given() -> None:
    asked = "from alignedserve.batch.limit import unlooked; print(unlooked('it'))"
    assert subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True).stdout.strip() == "it"

def test_another_uses_what_is_kept(kept) -> None:
    assert not os.path.exists("spoilt")

def test_one_more_uses_what_is_kept(kept) -> None:
    if os.path.exists("killed"):
        Path("killed").write_text(f"/dev/shm/alignedserve-test-{os.getpid()}-1")
        Path(Path("killed").read_text()).touch()
        os.kill(os.getpid(), 9)
    assert not os.path.exists("spoilt")
"""

# Stands in for vopr's: seed 2 fails always, seed 4 if the value is another one.
SEEDS = """
from types import SimpleNamespace

from alignedserve.batch.limit import Limit

def history_of(seed, systems):
    return seed

def run(seed):
    fails = Limit(3).unlooked() != 3 and seed == 4 or seed == 2
    return SimpleNamespace(failure=SimpleNamespace(message="fails") if fails else None)
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CollectedTests, Reach]]:
    """A package with one module and its tests, and what they execute."""
    root = tmp_path_factory.mktemp("toy")
    files = {FILE: LIMIT, "tests/batch/test_limit.py": TESTS, "alignedserve/vopr/runs/run.py": SEEDS}
    for file, text in files.items():
        (root / file).parent.mkdir(parents=True)
        (root / file).write_text(text)
    for package in ("alignedserve", "alignedserve/batch", "alignedserve/vopr", "alignedserve/vopr/runs"):
        (root / package / "__init__.py").touch()
    copy = copy_tree(root, tmp_path_factory.mktemp("copies") / "copy")
    tests = CollectedTests(copy, ["tests"], [FILE], root / "log")
    reach = Reach(digest_of(copy))
    measure(tests, "tests/batch/test_limit.py", [FILE], reach.add)
    yield tests, reach
    tests.end()


TAKES, IS_RIGHT, ELSEWHERE, USES_KEPT, USES_KEPT_TOO = (
    "tests/batch/test_limit.py::test_as_many_as_there_are",
    "tests/batch/test_limit.py::test_nothing_is_wrong",
    "tests/batch/test_limit.py::test_a_process_returns_what_it_is_given",
    "tests/batch/test_limit.py::test_another_uses_what_is_kept",
    "tests/batch/test_limit.py::test_one_more_uses_what_is_kept",
)
BOUNDS = Bounds(tests_cpu_s=60.0, vopr_cpu_s=0.0)


@pytest.mark.slow
def test_a_mutant_that_a_test_sees_is_caught_by_it(toy: tuple[CollectedTests, Reach]) -> None:
    found = attempt(changed("Limit.take")["self.num_taken += num", "pass"], *toy, BOUNDS)
    assert found.is_caught and found.by == TAKES and "assert" in found.why
    assert (found.num_reaching, found.num_run) == (1, 1)
    assert (toy[0].copy / FILE).read_text() == LIMIT


@pytest.mark.slow
def test_a_mutant_that_no_test_sees_lives(toy: tuple[CollectedTests, Reach]) -> None:
    found = attempt(changed("Limit.check")["self.num_taken < 0", "self.num_taken <= 0"], *toy, BOUNDS)
    assert not found.is_caught and found.by == "" and not found.is_cut
    assert (found.num_reaching, found.num_run) == (1, 1)


def test_a_mutant_whose_statement_no_test_executes_is_tried_by_those_of_its_folder(
    toy: tuple[CollectedTests, Reach],
) -> None:
    """They may start processes which execute it."""
    edit = changed("Limit.unlooked")["max(self.num_taken, self.most)", "min(self.num_taken, self.most)"]
    found = attempt(edit, *toy, BOUNDS)
    assert not found.is_caught and (found.num_reaching, found.num_run) == (0, 5)
    edit = changed("unlooked")["value", "None"]
    found = attempt(edit, *toy, BOUNDS)
    assert found.is_caught and found.by == ELSEWHERE and found.num_reaching == 0


@pytest.mark.parametrize("runs_twice", [False, True])
def test_a_test_that_fails_without_the_mutant_too_catches_none(
    runs_twice: bool, toy: tuple[CollectedTests, Reach], monkeypatch: pytest.MonkeyPatch
) -> None:
    tests, _ = toy
    edit = changed("Limit.check")["self.num_taken < 0", "self.num_taken <= 0"]
    monkeypatch.setitem(tests.runs_twice, IS_RIGHT, runs_twice)
    with existing(tests.copy / "busy"):
        found = attempt(edit, *toy, BOUNDS)
    assert not found.is_caught and found.num_run == 1
    assert (tests.copy / FILE).read_text() == LIMIT


@contextmanager
def existing(path: Path) -> Iterator[Path]:
    path.touch()
    yield path
    path.unlink()


# No test looks at it.
ALIVE = ("self.num_taken >= self.most", "self.num_taken > self.most")


def test_what_a_fixture_of_several_tests_executes_is_reached_by_all_of_them(
    toy: tuple[CollectedTests, Reach],
) -> None:
    line = LIMIT.split("\n").index("        return self.num_taken >= self.most") + 1
    assert toy[1].of(FILE, line) == [USES_KEPT, USES_KEPT_TOO]


def test_a_test_that_fails_leaves_nothing_of_such_a_fixture(toy: tuple[CollectedTests, Reach]) -> None:
    tests, _ = toy
    with existing(tests.copy / "spoilt"):
        found = attempt(changed("Limit.is_full")[ALIVE], *toy, BOUNDS)
    assert not found.is_caught and found.num_run == 2
    assert list(tests.copy.glob("made-by-*")) == []


def test_a_process_that_is_killed_leaves_no_segment(toy: tuple[CollectedTests, Reach]) -> None:
    with existing(toy[0].copy / "killed") as killed:
        assert not attempt(changed("Limit.is_full")[ALIVE], *toy, BOUNDS).is_caught
        segment = Path(killed.read_text())
    assert segment.parent == Path("/dev/shm") and not segment.exists()


def test_a_seed_of_vopr_that_fails_without_the_mutant_too_is_passed_over(
    toy: tuple[CollectedTests, Reach], monkeypatch: pytest.MonkeyPatch
) -> None:
    tests, reach = toy
    monkeypatch.setattr("benchmarks.mutants.reach._VOPR_CPU_S", 0.0)
    with_vopr = replace(reach, tests=dict(reach.tests))
    measure(tests, VOPR, [FILE], with_vopr.add)
    assert with_vopr.tests[VOPR].outcome == "passed"
    edit = changed("Limit.unlooked")["max(self.num_taken, self.most)", "min(self.num_taken, self.most)"]
    found = attempt(edit, tests, with_vopr, replace(BOUNDS, vopr_cpu_s=2.0))
    assert found.is_in_vopr and found.by == "vopr --seed 4"


def test_a_test_that_is_not_collected_any_more_is_not_run(toy: tuple[CollectedTests, Reach]) -> None:
    tests, reach = toy
    gone = replace(reach, tests=reach.tests | {"tests/batch/test_gone.py::test": reach.tests[IS_RIGHT]})
    found = attempt(changed("Limit.check")["self.num_taken < 0", "self.num_taken <= 0"], tests, gone, BOUNDS)
    assert not found.is_caught and found.num_reaching == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("new", "by"),
    [("__import__('os')._exit(3)", "import"), ("[each for each in iter(int, 1)]", "import"), ("2", IS_RIGHT)],
    ids=["ends the process", "does not end", "is caught by a test"],
)
def test_a_mutant_that_is_executed_when_it_is_imported(
    new: str, by: str, toy: tuple[CollectedTests, Reach], monkeypatch: pytest.MonkeyPatch
) -> None:
    tests, reach = toy
    if "iter" in new:
        monkeypatch.setattr(copies, "_COLLECTS_S", 1.0)

    def start() -> CollectedTests:
        return CollectedTests(tests.copy, ["tests"], [FILE], tests.copy / "log")

    found = attempt_imported(of_constant(new), tests, start, reach, BOUNDS)
    assert found.is_caught and found.by == by
    assert (tests.copy / FILE).read_text() == LIMIT


@pytest.mark.slow
def test_one_that_was_imported_goes_on_where_its_tests_stopped(toy: tuple[CollectedTests, Reach]) -> None:
    tests, reach = toy

    def start() -> CollectedTests:
        return CollectedTests(tests.copy, ["tests"], [FILE], tests.copy / "log")

    found = attempt_imported(of_constant("2"), tests, start, reach, BOUNDS)
    assert found.is_imported and found.is_caught and found.num_run <= found.num_reaching
    for num_run, is_caught in ((found.num_run - 1, True), (found.num_reaching, False)):
        before = replace(found, is_caught=False, num_run=num_run)
        again = attempt_imported(of_constant("2"), tests, start, reach, BOUNDS, before)
        assert again.is_caught == is_caught and again.num_run == max(num_run, found.num_run)


def of_constant(new: str) -> Edit:
    """Outside all functions."""
    place = next(edit for edit in changes(FILE, LIMIT) if edit.function == "Limit.take")
    line = LIMIT.split("\n").index("MOST = 8") + 1
    return replace(place, line=line, column=7, end_line=line, end_column=8, new=new, is_expression=True)


def test_a_mutant_that_ends_the_process_is_caught(toy: tuple[CollectedTests, Reach]) -> None:
    edit = replace(changed("Limit.take")["self.num_taken += num", "pass"], new="__import__('os')._exit(0)")
    found = attempt(edit, *toy, BOUNDS)
    assert found.is_caught and found.by == TAKES and found.why == "the process of the tests ended"


def test_a_mutant_outside_functions_is_told_from_one_that_lives(toy: tuple[CollectedTests, Reach]) -> None:
    assert attempt(of_constant("9"), *toy, BOUNDS).is_outside


def test_what_tests_execute_is_kept_for_the_same_state_of_the_tree(
    toy: tuple[CollectedTests, Reach], tmp_path: Path
) -> None:
    _, reach = toy
    path = tmp_path / "reach.json"
    reach.save(path)
    assert load(path, reach.digest) == reach
    assert load(path, "another") == Reach("another")
    line = LIMIT.split("\n").index("        if self.num_taken < 0 and not self.most:") + 1
    assert reach.of(FILE, line) == [IS_RIGHT]


def test_code_and_all_of_the_tests_are_a_trees_state(tmp_path: Path) -> None:
    for file in ("router/router.py", "tests/histories/one.json", "results/one.json"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    digests = {digest_of(tmp_path)}
    (tmp_path / "results/one.json").write_text("{}")
    assert digest_of(tmp_path) in digests
    for number, file in enumerate(("router/router.py", "tests/histories/one.json"), 2):
        (tmp_path / file).write_text("{}")
        digests.add(digest_of(tmp_path))
        assert len(digests) == number


def test_near_and_cheap_tests_come_first() -> None:
    costs = {
        "tests/sim/test_a.py::dear": 9.0,
        "tests/sim/test_a.py::cheap": 0.01,
        "tests/batch/test_c.py::dear": 3.0,
        "tests/batch/test_c.py::cheap": 0.3,
        "tests/batch/test_b.py::cheap": 0.2,
    }
    reach = Reach("", tests={name: Measured("passed", cpu_s, cpu_s, 0) for name, cpu_s in costs.items()})
    for names in itertools.permutations(costs):
        assert ordered(FILE, list(names), reach) == [
            "tests/batch/test_b.py::cheap",
            "tests/batch/test_c.py::cheap",
            "tests/sim/test_a.py::cheap",
            "tests/batch/test_c.py::dear",
            "tests/sim/test_a.py::dear",
        ]


# ---- live systems ----------------------------------------------------------------------------------------------------


def test_of_many_mutants_in_one_system_those_that_tests_catch_are_told() -> None:
    edits = apart([*changed("Limit.take").values(), *changed("Limit.check").values()])[0]
    files = ["tests/cluster/test_a.py", "tests/cluster/test_b.py", "tests/launch/test_c.py"]
    # The tests that fail with all of these mutants; all others pass.
    failing = {
        f"{files[0]}::a": [edits[1]],
        f"{files[1]}::always": [],
        f"{files[1]}::two_at_once": [edits[0], edits[-1]],
        f"{files[2]}::c": [edits[3]],
        f"{files[2]}::d": [edits[1]],
    }
    runs: list[tuple[int, list[str]]] = []

    def run(edits: Sequence[Edit], tests: Sequence[str], left_out: Sequence[str] = ()) -> str | None:
        runs.append((len(edits), list(tests)))
        chosen = (name for name in failing if name.startswith(tuple(tests)) and name not in left_out)
        return next((name for name in chosen if all(edit in edits for edit in failing[name])), None)

    told: list[tuple[Edit, str]] = []
    caught_live(edits, files, run, lambda *each: told.append(each))
    assert told == [(edits[1], f"{files[0]}::a"), (edits[3], f"{files[2]}::c")]
    # What came before the file of a test that failed is not run again.
    assert [tests for _, tests in runs if "::" not in tests[0]] == [
        files,
        files,
        files[1:],
        files[1:],
        files[2:],
    ]


def test_a_test_that_fails_once_catches_none() -> None:
    test, failures = "tests/cluster/test_a.py::a", [True]

    def run(edits: Sequence[Edit], tests: Sequence[str], left_out: Sequence[str] = ()) -> str | None:
        return test if edits and failures and failures.pop() else None

    told: list[tuple[Edit, str]] = []
    (edit, *_) = changed("Limit.take").values()
    caught_live([edit], ["tests/cluster/test_a.py"], run, lambda *each: told.append(each))
    assert not told and not failures


@pytest.mark.slow
def test_the_first_test_that_fails_is_read_from_the_summary(tmp_path: Path) -> None:
    folder = tmp_path / "tests/cluster"
    folder.mkdir(parents=True)
    (folder / "test_a.py").write_text(
        "import logging\n\n"
        "def test_one() -> None:\n    logging.error('failed - too')\n    print('ERROR tests/x.py')\n"
        "    assert False\n\n"
        "def test_two() -> None:\n    pass\n"
    )
    (folder / "test_b.py").write_text("import nothing_of_that_name\n")
    files, run = ["tests/cluster/test_a.py", "tests/cluster/test_b.py"], run_in(tmp_path)
    one = f"{files[0]}::test_one"
    assert run([], files[:1]) == one
    assert run([], files[:1], [one, f"{files[0]}::test_two"]) is None
    assert run([], files, [one]) == files[1]
    assert run([], files, [one, files[1]]) is None


def test_mutants_of_one_file_live_together_where_they_do_not_touch() -> None:
    taken, checked = list(changed("Limit.take").values()), list(changed("Limit.check").values())
    groups = apart([*taken, *checked])
    assert sum(map(len, groups)) == len(taken) + len(checked) and len(groups) > 1
    for group in groups:
        text = together(LIMIT, group)
        compile(text, FILE, "exec")
        assert text.count("\n") == LIMIT.count("\n")
        assert all(f"({each.new})" in text for each in group if each.is_expression)


# ---- the table -------------------------------------------------------------------------------------------------------


def verdict(
    key: str, area: str | None, by: str, num_reaching: int = 1, *, is_in_vopr: bool = False
) -> Verdict:
    return Verdict(
        key,
        f"mutant | {key}",
        area,
        FILE,
        1,
        "f",
        "a",
        "b",
        bool(by),
        by,
        "",
        num_reaching,
        1,
        is_in_vopr,
        1.0,
        False,
    )


VERDICTS = [
    verdict("1", "router", TAKES),
    verdict("2", "router", "vopr --seed 7", is_in_vopr=True),
    verdict("3", "router", "", is_in_vopr=True),
    verdict("4", "store", "", num_reaching=0),
    verdict("5", None, IS_RIGHT),
]


def test_the_table_adds_up_and_names_those_that_live() -> None:
    text = page(VERDICTS, {"3": "equivalent"}, "command")
    assert "3 of 5 are caught" in text
    assert "| router | 3 | 2 | 1 | 1 | 1 | 0 |" in text
    assert "| store | 1 | 0 | 0 | 0 | 1 | 1 |" in text
    assert "| elsewhere | 1 | 1 | 1 | 0 | 0 | 0 |" in text
    assert "| all | 5 | 3 | 2 | 1 | 2 | 1 |" in text
    assert "| 3 | mutant \\| 3 | `f` | 1 and vopr | equivalent |" in text
    assert "| `tests/batch/test_limit.py` | 2 |" in text


def test_a_run_goes_on_with_what_was_saved_in_the_same_tree(tmp_path: Path) -> None:
    assert saved(tmp_path, "digest") == []
    save(VERDICTS, tmp_path, "command", "digest")
    assert saved(tmp_path, "digest") == VERDICTS
    assert saved(tmp_path, "another") == []


def test_remarks_say_what_kind_they_are() -> None:
    assert all(each.split(":")[0] in ("equivalent", "hole", "live") for each in remarks().values())


def test_files_of_an_area_are_in_that_area() -> None:
    for area in AREAS:
        assert {area_of(file) for file in files_of(area, ROOT)} == {area}
    assert area_of("alignedserve/launch/plan.py") is None
