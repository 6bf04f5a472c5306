"""A test that takes minutes also runs when something it deploys has changed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.deploy.changes import DEPLOYED, ROOT, differs


def git(root: Path, *words: str) -> None:
    command = ["git", "-C", str(root), "-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    # A hook's variables would name the repository that it is run for.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run([*command, *words], env=env, check=True)


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "Change something")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits: the second changes nothing that is deployed."""
    git(tmp_path, "init", "-q")
    for name in ("deploy/file", "cluster.yaml", "tests/deploy/file", "other"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    commit(tmp_path)
    (tmp_path / "other").write_text("after")
    commit(tmp_path)
    return tmp_path


def test_all_that_is_looked_at_is_there() -> None:
    assert all((ROOT / name).exists() for name in DEPLOYED)


@pytest.mark.parametrize("name", ["deploy/file", "cluster.yaml", "tests/deploy/file"])
def test_a_change_is_seen_before_and_after_its_commit_and_not_later(repository: Path, name: str) -> None:
    assert not differs(repository)
    (repository / name).write_text("after")
    assert differs(repository)
    commit(repository)
    assert differs(repository)
    (repository / "other").write_text("later")
    commit(repository)
    assert not differs(repository)


def test_without_a_commit_before_nothing_has_changed(tmp_path: Path) -> None:
    assert not differs(tmp_path)
    git(tmp_path, "init", "-q")
    (tmp_path / "deploy").write_text("new")
    commit(tmp_path)
    assert not differs(tmp_path)
