"""A run's report of its own time, and that a folder over its budget fails the run."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from benchmarks.ci_time import RESULTS
from tests.inner_pytest import ROOT, run_pytest
from tests.timings import BUDGET, GENEROSITY, budgets, excesses, pace_of

BUDGETS = {"router": 60.0, "kvpool": 30.0, "sim": 90.0, "tiny": 5.0}
USUAL = {name: seconds / GENEROSITY for name, seconds in BUDGETS.items()}


def test_what_is_within_its_budget_is_no_excess() -> None:
    assert excesses(USUAL, BUDGETS) == []
    assert excesses(USUAL | {"router": 59.0}, BUDGETS) == []


def test_a_folder_that_outgrew_the_others_is_named_with_both_numbers() -> None:
    (found,) = excesses(USUAL | {"router": 61.0}, BUDGETS)
    assert str(found).startswith("tests/router took 61 s and may take 60: ")


def test_a_folder_without_a_budget_is_named() -> None:
    assert [each.folder for each in excesses(USUAL | {"new": 1.0}, BUDGETS)] == ["new"]


def test_a_slow_machine_is_no_excess_and_hides_none() -> None:
    slow = {name: 3 * seconds for name, seconds in USUAL.items()}
    assert pace_of(slow, BUDGETS) == 3
    assert excesses(slow, BUDGETS) == []
    assert [each.folder for each in excesses(slow | {"sim": 271.0}, BUDGETS)] == ["sim"]


def test_a_slow_processor_slows_what_computes_and_not_what_waits() -> None:
    """Two cores' tests on one core, as measured: half of the folders took as long as ever."""
    paces = {
        "router": 2.3,
        "kvpool": 2.2,
        "sim": 2.0,
        "launch": 1.1,
        "cluster": 1.0,
        "deploy": 1.0,
        "models": 1.0,
    }
    allowed = dict.fromkeys(paces, 60.0)
    slow = {name: 40 * pace for name, pace in paces.items()}
    assert pace_of(slow, allowed) == pytest.approx(1.1)
    assert excesses(slow, allowed) == []
    assert [each.folder for each in excesses(slow | {"launch": 139.0}, allowed)] == ["launch"]
    assert [each.folder for each in excesses(slow | {"sim": 139.0}, allowed)] == ["sim"]


def test_folders_that_were_not_run_say_nothing_about_the_pace() -> None:
    many = BUDGETS | {f"folder{number}": 60.0 for number in range(9)}
    slow = {name: 3 * USUAL[name] for name in ("router", "kvpool")}
    assert pace_of(slow, many) == 3
    assert excesses(slow, many) == []


def test_a_folder_that_was_run_alone_is_held_to_its_budget() -> None:
    assert [each.folder for each in excesses({"router": 61.0}, BUDGETS)] == ["router"]


def test_a_quick_machine_has_no_smaller_budget() -> None:
    assert pace_of({name: seconds / 9 for name, seconds in USUAL.items()}, BUDGETS) == 1


def test_every_folder_has_a_budget_and_no_other() -> None:
    folders = {
        path.parent.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/test_*.py")
    }
    assert budgets(BUDGET).keys() == {".", *folders}


def test_the_budgets_are_what_folders_took_and_half_of_that() -> None:
    """Within what runs differ by, since each draws other cases. None has a smaller budget than 10 s."""
    took = json.loads(RESULTS.read_text())["folders_s"]
    usual = tomllib.loads(BUDGET.read_text())["seconds"]
    assert took.keys() == usual.keys()
    allowed = budgets(BUDGET)
    assert {name: took[name] for name in took if took[name] > allowed[name]} == {}
    assert {name: usual[name] for name in took if usual[name] > max(10, 4 * took[name])} == {}


def test_seconds_of_turns_come_on_top(tmp_path: Path) -> None:
    (tmp_path / "budget.toml").write_text("[seconds]\nrouter = 10\nsim = 20\n[turns]\nsim = 5\n")
    assert budgets(tmp_path / "budget.toml") == {"router": 10, "sim": 25}


QUICK = "def test_it(): pass"
SHAKY = """
import time

import pytest

def test_it(request):
    if request.node.execution_count == 1:
        time.sleep(0.3)
        assert False
"""


def test_a_run_prints_its_slowest_files_and_writes_them_down(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    files = {"router/test_a.py": QUICK, "test_b.py": QUICK}
    code, said = run_pytest(tmp_path, files, "--record", str(record), plugins=["tests.timings"])
    assert code == 0, said
    assert "s  tests/router/test_a.py" in said and "s  in all; " in said
    found = json.loads(record.read_text())
    assert found["files"].keys() == {"tests/router/test_a.py", "tests/test_b.py"}
    assert found["folders"].keys() == {"router", "."}


def test_a_folder_over_its_budget_fails_a_run_whose_tests_pass(tmp_path: Path) -> None:
    files = {"nobody_s/test_a.py": QUICK}
    options = ("--record", str(tmp_path / "record.json"), "-n", "1")
    code, said = run_pytest(tmp_path, files, *options, plugins=["tests.timings", "xdist"])
    assert code == 1 and "1 passed" in said, said
    assert "OVER BUDGET tests/nobody_s took " in said


def test_a_first_run_that_failed_does_not_count(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    options = ("--record", str(record), "--reruns", "1")
    plugins = ["tests.timings", "pytest_rerunfailures"]
    code, said = run_pytest(tmp_path, {"router/test_a.py": SHAKY}, *options, plugins=plugins)
    assert code == 0 and "1 rerun" in said, said
    assert json.loads(record.read_text())["folders"]["router"] < 0.3
