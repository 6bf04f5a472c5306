"""Tests of kernels that fail are named in the record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TESTS = """
import pytest


@pytest.mark.parametrize("number", [1, 2, 3])
def test_small(number):
    assert number < 3, "too large"


@pytest.mark.skip
def test_not_here():
    pass


@pytest.fixture
def broken():
    raise RuntimeError("out of luck")


def test_without_its_fixture(broken):
    pass


@pytest.mark.drawn(one_in=1000)
def test_drawn():
    pass
"""


def test_each_file_is_a_row_and_what_fails_has_its_name_and_why(tmp_path: Path) -> None:
    (tmp_path / "test_bad.py").write_text(TESTS)
    (tmp_path / "test_good.py").write_text("def test_it():\n    pass\n")
    out = tmp_path / "out"
    out.mkdir()
    files = [str(tmp_path / name) for name in ("test_bad.py", "test_good.py")]
    command = [sys.executable, "-m", "benchmarks.gpu.kernel_tests", "--tiny", "--out", str(out), *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr

    bad, good = json.loads((out / "gpu.json").read_text())["rows"]
    assert (bad["case"], good["case"]) == ("test_bad.py", "test_good.py")
    assert (bad["num_passed"], bad["num_failed"], bad["num_skipped"]) == (3, 2, 1)
    why = dict(bad["failures"])
    assert why.keys() == {"test_small[3]", "test_without_its_fixture"}
    assert "too large" in why["test_small[3]"] or "assert" in why["test_small[3]"]
    assert "out of luck" in why["test_without_its_fixture"]
    assert bad["summary"].startswith("2 failed, 3 passed, 1 skipped FAILED test_small[3]: ")
    assert (good["num_passed"], good["failures"], good["summary"]) == (1, [], "1 passed")
    assert bad["took_s"] >= 0 and good["took_s"] >= 0
