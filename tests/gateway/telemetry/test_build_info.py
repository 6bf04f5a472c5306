"""The commit is found where there is one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import alignedserve
from alignedserve.gateway.telemetry.build_info import build_info, commit_of


def git(at: Path, *words: str) -> str:
    user = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(
        ["git", "-C", str(at), *user, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "of"
    path.mkdir()
    git(path, "init", "-q", "-b", "main")
    git(path, "commit", "-q", "--allow-empty", "-m", "first")
    return path


def test_it_is_that_of_the_branch_of_packed_branches_of_a_work_tree_and_of_no_branch(
    repository: Path, tmp_path: Path
) -> None:
    commit = git(repository, "rev-parse", "HEAD")[:12]
    assert commit_of(repository, None) == commit
    git(repository, "pack-refs", "--all")
    assert commit_of(repository, None) == commit
    git(repository, "worktree", "add", "-q", str(tmp_path / "beside"))
    assert commit_of(tmp_path / "beside", None) == commit
    git(repository, "checkout", "-q", "--detach")
    assert commit_of(repository, None) == commit


def test_a_build_can_give_it_and_it_may_be_unknown(tmp_path: Path) -> None:
    assert commit_of(tmp_path, None) == "" == commit_of(tmp_path, "not a commit")
    assert commit_of(tmp_path, "0123456789abcdef") == "0123456789ab"
    assert build_info()[0] == alignedserve.__version__
