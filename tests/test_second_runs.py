"""What runs once more, on what, and how that is told: by pytest in a process of its own, with this suite's conftest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import LIVE
from tests.inner_pytest import ROOT, run_pytest

pytestmark = pytest.mark.slow

# Others that are installed take seconds to import.
PLUGINS = ("tests.conftest", "xdist", "rerunfailures", "hypothesispytest")

SHAKY = """
import pytest

@pytest.fixture(scope="module")
def cluster():
    processes = ["decode-0"]
    yield processes
    assert processes, "a process too few"

def test_shaky(cluster, request):
    assert cluster.pop()
    assert request.node.execution_count == 2, "the first time"

def test_steady(cluster):
    # that of the second run
    assert cluster == []
    cluster.append("decode-0")
"""
FAILING = """
def test_failing():
    assert 1 == 2
"""
RARELY_FAILING = """
from hypothesis import given, strategies

@given(strategies.integers())
def test_rarely_failing(number):
    assert number < 2000
"""


def test_what_may_have_a_second_run_exists() -> None:
    assert [name for name in LIVE if not (ROOT / "tests" / name).exists()] == []


def test_a_live_test_that_passes_only_on_its_second_run_is_named_and_no_failure(tmp_path: Path) -> None:
    code, said = run_pytest(
        tmp_path, {"cluster/test_a.py": SHAKY}, "-n", "1", "--dist", "loadfile", plugins=PLUGINS
    )
    assert code == 0, said
    *_, last = said.partition("= flaky =")
    assert "AssertionError: the first time" in last
    lines = last.rstrip().split("\n")
    name = "FLAKY tests/cluster/test_a.py::test_shaky passed only on its second run"
    assert lines[lines.index(name) + 1] == "1 flaky"
    assert lines[-1].startswith("2 passed, 1 rerun in ")


def test_what_fails_twice_or_has_no_second_run_fails(tmp_path: Path) -> None:
    files = {
        "cluster/test_failing.py": FAILING,
        "cluster/test_rarely_failing.py": RARELY_FAILING,
        "sim/test_shaky.py": FAILING,
    }
    code, said = run_pytest(tmp_path, files, plugins=PLUGINS)
    assert code == 1, said
    assert "flaky" not in said
    assert said.rstrip().split("\n")[-1].startswith("3 failed, 1 rerun in ")
    # how to repeat the property test's failure
    assert "@reproduce_failure(" in said


def test_the_first_internal_error_is_told_last(tmp_path: Path) -> None:
    broken = """
import pytest

def pytest_runtest_protocol(item):
    raise RuntimeError("this worker broke down")
"""
    code, said = run_pytest(
        tmp_path,
        {"conftest.py": broken, "test_a.py": "def test_it(): pass"},
        *("-n", "1"),
        plugins=PLUGINS,
    )
    *_, last = said.partition("the first internal error:")
    assert code != 0 and "RuntimeError: this worker broke down" in last, said
