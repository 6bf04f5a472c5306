"""Environments of clients are shared by the checkouts of a machine, and those in use are kept."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.clients import environments

ROOT = Path(__file__).parents[2]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(environments, "MADE", tmp_path / "made")
    environments.MADE.mkdir()
    return environments.MADE


def old(directory: Path) -> Path:
    """Of four weeks ago, with a file."""
    directory.mkdir()
    (directory / "file").touch()
    os.utime(directory, (time.time() - 2 * environments.KEPT_S,) * 2)
    return directory


def test_an_environment_that_tests_use_is_kept(made: Path) -> None:
    directory = old(environments.directory_of("openai"))
    assert environments.python_of("openai") == directory / "bin/python"
    assert time.time() - directory.stat().st_mtime < environments.KEPT_S


def test_those_that_nobody_has_used_are_removed(made: Path) -> None:
    own, of_another = old(environments.directory_of("ray-data")), old(made / ("ray-" + 12 * "0"))
    used = made / ("ray-data-" + 12 * "1")
    used.mkdir()
    old(made / ("ray-data-" + 12 * "0"))
    old(made / "ray-data-abc_1.part")
    environments.remove_unused("ray-data")
    assert sorted(made.iterdir()) == sorted([own, of_another, used])


def test_what_is_removed_is_never_there_in_part(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another checkout may look meanwhile."""
    directory = old(made / ("openai-" + 12 * "0"))
    seen = []

    def rmtree(path: str, **options: object) -> None:
        seen.append((directory.exists(), sorted(each.name for each in Path(path).rglob("*"))))

    monkeypatch.setattr("shutil.rmtree", rmtree)
    environments.remove_unused("openai")
    assert seen == [(False, ["environment", "file"])]


def test_another_node_gets_an_environment_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for version in ("v20.1.0 linux x64", "v20.1.0 linux arm64", "v22.1.0 linux x64"):
        (tmp_path / "node").write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / "node").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        found.add(environments.directory_of("node"))
    (tmp_path / "node").unlink()
    found.add(environments.directory_of("node"))
    assert len(found) == 4


def test_a_relative_directory_is_that_of_where_it_was_named(tmp_path: Path) -> None:
    script = "import os; from tests.clients.environments import MADE; os.chdir('/'); print(MADE)"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "ALIGNEDSERVE_CLIENTS_DIR": "clients"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == str(tmp_path / "clients")
