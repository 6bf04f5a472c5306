"""A run's report of its own time, and that a folder over its budget fails the run."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.ci_time import RESULTS
from tests.budgets import BUDGET, GENEROSITY, Budget, Taken, excesses, pace_of
from tests.inner_pytest import ROOT, run_pytest
from tests.timings import INTERRUPTIBLE, end

SECONDS = {"router": 60.0, "kvpool": 30.0, "sim": 90.0, "tiny": 5.0}
BUDGETS = Budget(SECONDS, turns={"sim": 100.0}, fixed_work_s=0.1)
USUAL = {name: seconds / GENEROSITY for name, seconds in SECONDS.items()}


def over(folders: Mapping[str, float], budget: Budget = BUDGETS, fixed_work_s: float = 0.1) -> list[str]:
    return [each.tests for each in excesses(Taken(folders, fixed_work_s=fixed_work_s), budget)]


def test_what_is_within_its_budget_is_no_excess() -> None:
    assert over(USUAL) == []
    assert over(USUAL | {"router": 59.0}) == []


def test_a_folder_that_outgrew_the_others_is_named_with_both_numbers() -> None:
    (found,) = excesses(Taken(USUAL | {"router": 61.0}), BUDGETS)
    assert str(found).startswith("tests/router took 61 s and may take 60: ")


def test_a_folder_without_a_budget_is_named() -> None:
    assert over(USUAL | {"new": 1.0}) == ["tests/new"]


@pytest.mark.parametrize("fixed_work_s", [0.1, 0.3])
def test_a_slow_machine_is_no_excess_and_hides_none(fixed_work_s: float) -> None:
    """It is slower at everything; at the fixed work as well, or not."""
    slow = {name: 3 * seconds for name, seconds in USUAL.items()}
    assert pace_of(Taken(slow, fixed_work_s=fixed_work_s), BUDGETS) == pytest.approx(3)
    assert over(slow, fixed_work_s=fixed_work_s) == []
    assert over(slow | {"sim": 271.0}, fixed_work_s=fixed_work_s) == ["tests/sim"]


# the budgets of what takes longest, and what it took on one core
LONGEST = {
    "benchmarks": (185, 171),
    "cli": (185, 188),
    "clients": (200, 181),
    "cluster": (545, 508),
    "engine": (375, 388),
    "gateway": (655, 890),
    "kernels": (335, 154),
    "launch": (640, 390),
    "models": (65, 53),
    "ops": (275, 294),
    "sim": (250, 266),
    "vopr": (110, 161),
}
LONG = Budget({name: float(seconds) for name, (seconds, _) in LONGEST.items()}, fixed_work_s=0.1)
ON_ONE_CORE = {name: float(seconds) for name, (_, seconds) in LONGEST.items()}


def test_a_slow_processor_slows_what_computes_and_not_what_waits() -> None:
    """The median is too small for gateway and vopr, since half of the folders wait. The fixed work is slowed, too."""
    assert {"tests/gateway", "tests/vopr"} & {*over(ON_ONE_CORE, LONG)}
    assert over(ON_ONE_CORE, LONG, fixed_work_s=0.17) == []
    grown = ON_ONE_CORE | {"gateway": 1120.0}
    assert over(grown, LONG, fixed_work_s=0.17) == ["tests/gateway"]


def test_folders_that_grow_together_do_not_excuse_each_other() -> None:
    """They wait, so that the fixed work takes no longer."""
    usual = {name: seconds / GENEROSITY for name, seconds in LONG.folders.items()}
    grown = {name: 2 * usual[name] for name in ("launch", "cluster", "clients")}
    assert over(usual | grown, LONG) == ["tests/clients", "tests/cluster", "tests/launch"]


def test_small_folders_say_nothing_about_the_pace() -> None:
    many = Budget({f"folder{number}": 50.0 for number in range(9)} | {"router": 60.0, "sim": 90.0})
    slow = {name: 2 * seconds / GENEROSITY for name, seconds in many.folders.items() if "folder" in name}
    assert pace_of(Taken(slow | {"router": 40.0, "sim": 60.0}), many) == 1


def test_folders_that_were_not_run_say_nothing_about_the_pace() -> None:
    many = Budget(SECONDS | {f"folder{number}": 60.0 for number in range(9)})
    slow = {name: 3 * USUAL[name] for name in ("router", "sim")}
    assert pace_of(Taken(slow), many) == 3
    assert over(slow, many) == []


def test_a_folder_that_was_run_alone_is_held_to_its_budget() -> None:
    assert over({"router": 61.0}) == ["tests/router"]


def test_a_quick_machine_has_no_smaller_budget() -> None:
    quick = {name: seconds / 9 for name, seconds in USUAL.items()}
    assert pace_of(Taken(quick, fixed_work_s=0.01), BUDGETS) == 1


def test_turns_have_budgets_of_their_own_and_change_no_pace() -> None:
    def with_turns(seconds: float, number: int, folders: Mapping[str, float] = USUAL) -> Taken:
        return Taken(folders, turns={"sim": seconds}, num_turns={"sim": number})

    assert excesses(with_turns(99.0, 1), BUDGETS) == []
    assert excesses(with_turns(199.0, 2), BUDGETS) == []
    (found,) = excesses(with_turns(101.0, 1), BUDGETS)
    assert str(found).startswith("tests/sim in turn took 101 s and may take 100: ")
    # What a turn leaves is not for others.
    (found,) = excesses(with_turns(10.0, 1, USUAL | {"sim": 91.0}), BUDGETS)
    assert found.tests == "tests/sim"
    (found,) = excesses(Taken(USUAL, turns={"new": 1.0}, num_turns={"new": 1}), BUDGETS)
    assert found.tests == "tests/new in turn"


def test_every_folder_has_a_budget_and_no_other() -> None:
    folders = {
        path.parent.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/test_*.py")
    }
    budget = Budget.read()
    assert budget.folders.keys() == {".", *folders}
    assert budget.turns.keys() <= folders


def test_the_budgets_are_what_folders_took_and_half_of_that() -> None:
    """Within what runs differ by, since each draws other cases. None has a smaller budget than 10 s."""
    took = json.loads(RESULTS.read_text())["folders_s"]
    budget = tomllib.loads(BUDGET.read_text())
    usual, turns = budget["seconds"], budget["turns"]
    assert took.keys() == usual.keys()
    # The record has the seconds of turns with the others.
    allowed = {name: usual[name] + turns.get(name, 0) for name in usual}
    assert {name: took[name] for name in took if took[name] > allowed[name]} == {}
    assert {name: usual[name] for name in took if usual[name] > max(10, 4 * took[name])} == {}


QUICK = "def test_it(): pass"
# The pace is 1 on any machine.
BUDGET_OF_A_TURN = "fixed_work_s = 1000.0\n[seconds]\nops = 30\nother = 30\n[turns]\nops = 2"
# It counts its runs in a file beside it.
SLOW = """
from pathlib import Path

import pytest

@pytest.mark.drawn(one_in=1, turn=0)
def test_it(request):
    runs = Path(__file__).with_name("runs")
    runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
    assert len(runs.read_text()) != FAILING_RUN
"""
# As if some runs of it took three seconds.
SLOW_RUN = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    outcome = yield
    runs = item.path.with_name("runs")
    is_slow = runs.exists() and len(runs.read_text()) <= SLOW_RUNS
    outcome.get_result().duration = 3.0 * (is_slow and outcome.get_result().when == "call")
"""
TURNS = """
import pytest

@pytest.mark.parametrize(
    "case", ["always", *(pytest.param(each, marks=pytest.mark.drawn(one_in=3, turn=each)) for each in range(3))]
)
def test_it(case): pass
"""
# As if these took so long.
SLOW_FOLDERS = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    outcome = yield
    # for each of three reports
    outcome.get_result().duration = 30 if item.path.parent.name in ("cluster", "launch") else 13
"""
SHAKY = """
def test_it(request):
    assert request.node.execution_count > 1
"""
# As if its first run took long.
SLOW_FIRST_RUN = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    outcome = yield
    outcome.get_result().duration = 30.0 if item.execution_count == 1 else 0.1
"""


def test_a_run_prints_its_slowest_files_and_writes_them_down(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    files = {"router/test_a.py": QUICK, "test_b.py": QUICK}
    code, said = run_pytest(tmp_path, files, "--record", str(record), plugins=["tests.timings"])
    assert code == 0, said
    assert "s  tests/router/test_a.py" in said and "s  in all; " in said
    found = json.loads(record.read_text())
    assert found["files"].keys() == {"tests/router/test_a.py", "tests/test_b.py"}
    assert found["folders"].keys() == {"router", "."} and found["turns"] == {}


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_turns_and_the_fixed_work_are_recorded(options: tuple[str, ...], tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    plugins = ["tests.timings", "tests.draws", "xdist"]
    files = {"ops/test_a.py": TURNS}
    code, said = run_pytest(tmp_path, files, f"--record={record}", "--everything", *options, plugins=plugins)
    assert code == 0 and "a turn, 3 run  tests/ops" in said and "fixed work, 1 times" in said, said
    found = json.loads(record.read_text())
    assert found["folders"].keys() == found["turns"].keys() == {"ops"} and found["fixed_work_s"] > 0


def test_a_folder_over_its_budget_fails_a_run_whose_tests_pass(tmp_path: Path) -> None:
    files = {"nobody_s/test_a.py": QUICK}
    options = ("--record", str(tmp_path / "record.json"), "-n", "1")
    code, said = run_pytest(tmp_path, files, *options, plugins=["tests.timings", "xdist"])
    assert code == 1 and "1 passed" in said, said
    assert "OVER BUDGET tests/nobody_s took " in said


@pytest.mark.parametrize(
    ("slow_runs", "failing_run", "code", "last"),
    [
        (1, 0, 0, "tests/ops in turn took 3 s, and was quick enough in a second run"),
        (9, 0, 1, "OVER BUDGET tests/ops in turn took 3 s and may take 2: "),
        (1, 2, 1, "OVER BUDGET tests/ops in turn took 3 s and may take 2: "),
    ],
    ids=["once", "each time", "fails then"],
)
@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_folder_over_its_budget_is_run_once_more(
    slow_runs: int, failing_run: int, code: int, last: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    slow = SLOW.replace("FAILING_RUN", str(failing_run))
    slow_run = SLOW_RUN.replace("SLOW_RUNS", str(slow_runs))
    files = {"ops/test_a.py": slow, "ops/conftest.py": slow_run, "other/test_b.py": QUICK}
    (tmp_path / "budget.toml").write_text(BUDGET_OF_A_TURN)
    options = (*options, f"--budget={tmp_path}/budget.toml", "--record", f"{tmp_path}/record.json")
    plugins = ["tests.timings", "tests.draws", "xdist"]
    found, said = run_pytest(tmp_path, files, *options, plugins=plugins)
    assert found == code, said
    # The last line but one, where a run that is cut short still shows it. The last one is pytest's own.
    assert said.rstrip().splitlines()[-2].startswith(last), said
    assert (tmp_path / "tests/ops/runs").read_text() == "xx"
    assert not (tmp_path / "record.json.again").exists() or failing_run


def test_folders_that_are_slow_in_both_runs_do_not_excuse_each_other(tmp_path: Path) -> None:
    """There are only these in the second run, so each could take the other's seconds for the machine's pace."""
    slow, usual = ("cluster", "launch"), ("cli", "clients", "engine", "gateway")
    budgets = "\n".join(f"{name} = 60" for name in (*slow, *usual))
    (tmp_path / "budget.toml").write_text(f"fixed_work_s = 1000.0\n[seconds]\n{budgets}\n[turns]\n")
    files = {f"{name}/test_{name}.py": QUICK for name in (*slow, *usual)} | {"conftest.py": SLOW_FOLDERS}
    options = (f"--budget={tmp_path}/budget.toml", f"--record={tmp_path}/record.json")
    code, said = run_pytest(tmp_path, files, *options, plugins=["tests.timings"])
    assert code == 1, said
    over = [line.split(" and may")[0] for line in said.splitlines() if "OVER BUDGET" in line]
    assert over == [f"OVER BUDGET tests/{name} took 90 s" for name in slow]


def test_a_first_run_that_failed_does_not_count(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    options = ("--record", str(record), "--reruns", "1")
    plugins = ["tests.timings", "pytest_rerunfailures"]
    files = {"router/test_a.py": SHAKY, "conftest.py": SLOW_FIRST_RUN}
    code, said = run_pytest(tmp_path, files, *options, plugins=plugins)
    assert code == 0 and "1 rerun" in said, said
    assert json.loads(record.read_text())["folders"]["router"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("then", "said"),
    [("print('x' * 200_000)", "x" * 200_000 + "\n"), ("print('over')", "over\n")],
    ids=["much", "little"],
)
def test_a_second_run_that_is_stopped_can_end_what_it_has_started(then: str, said: str) -> None:
    code = f"import time\ntry:\n  print('begun', flush=True)\n  time.sleep(600)\nexcept KeyboardInterrupt:\n  {then}"
    with subprocess.Popen(
        [*INTERRUPTIBLE, sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        assert end(process) == said
    assert process.returncode == 0
