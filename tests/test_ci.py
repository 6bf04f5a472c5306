"""What .ci/run does with lint and types, which run beside all else: with targets of make that do nothing but end."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.inner_pytest import ROOT

# `make lint types docs` keeps the process that waits for it in a file; EARLY: it ends before `make clients` does,
# otherwise not before the tests have begun.
MAKE = """#!/bin/sh
echo "target $*" >> targets
case "$*" in
"lint types docs")
  echo $PPID > beside
  test -n "$EARLY" || until grep -q test-all targets; do sleep 0.01; done
  echo "lint's last words"
  exit $LINT
  ;;
clients)
  until test -s beside; do sleep 0.01; done
  while test -n "$EARLY" && test -e /proc/$(cat beside); do sleep 0.01; done
  ;;
test-all)
  echo "the tests' last words"
  exit $TESTS
  ;;
esac
"""
GIT = "#!/bin/sh\necho abcdef1\n"
# Programs of Debian's packages: none is missing, and `apt-get` does nothing.
PACKAGES = (
    *("chromedriver", "npm", "sshd", "rsync", "ip", "debootstrap"),
    *("aarch64-linux-gnu-g++", "qemu-aarch64", "apt-get"),
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    programs = {"make": MAKE, "git": GIT} | dict.fromkeys(PACKAGES, "#!/bin/sh\n")
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run(checkout: Path, lint: int, tests: int, is_early: bool) -> tuple[int, list[str], list[str]]:
    """Its exit code, the targets that it made, and the last words of these, as they were printed."""
    environment = os.environ | {
        "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}",
        "TMPDIR": str(checkout),
        "LINT": str(lint),
        "TESTS": str(tests),
        "EARLY": "yes" if is_early else "",
    }
    command = ["bash", ".ci/run"]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=60)
    targets = (checkout / "targets").read_text().splitlines()
    said = [line.split("'")[0] for line in done.stdout.splitlines() if line.endswith("last words")]
    return done.returncode, [line.removeprefix("target ") for line in targets], said


def test_no_test_is_run_if_lint_has_failed_before(checkout: Path) -> None:
    code, targets, said = run(checkout, lint=1, tests=0, is_early=True)
    assert code == 1
    assert "test-all" not in targets and said == ["lint"]


def test_lint_that_fails_beside_the_tests_fails_the_run(checkout: Path) -> None:
    code, targets, said = run(checkout, lint=1, tests=0, is_early=False)
    assert code == 1
    assert targets[-1] == "test-all" and said == ["the tests", "lint"]


@pytest.mark.parametrize("is_early", [True, False])
def test_a_run_whose_tests_fail_ends_with_their_last_words(checkout: Path, is_early: bool) -> None:
    code, targets, said = run(checkout, lint=0, tests=1, is_early=is_early)
    assert code == 1
    assert targets[-1] == "test-all" and said == ["the tests"]


@pytest.mark.parametrize("is_early", [True, False])
def test_a_run_in_which_nothing_fails_goes_on_to_new_seeds(checkout: Path, is_early: bool) -> None:
    code, targets, said = run(checkout, lint=0, tests=0, is_early=is_early)
    assert code == 0
    assert targets[-4:] == ["test-all", "vopr", "attack", "arena"] and said == ["the tests"]
