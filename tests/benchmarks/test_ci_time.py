"""CI is measured as where none of its environments are there yet."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import ci_time

CI = """
set -eu
test ! -e "$ALIGNEDSERVE_CLIENTS_DIR"
mkdir "$ALIGNEDSERVE_CLIENTS_DIR"
echo '{"whole_s": 7.0, "folders": {"router": 3.0}, "fixed_work_s": 0.05}' > "$RECORD"
"""


def test_each_run_makes_the_clients_environments_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/run").write_text(CI)
    (tmp_path / "Makefile").write_text("test:\n")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), (*author, "commit", "-q", "-m", "First")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(ci_time, "ROOT", tmp_path)
    for _ in range(2):
        found = ci_time.measure(with_ci=True)
        assert found.commands_s.keys() == {ci_time.CI, ci_time.TEST_ALL, ci_time.TEST}
        assert found.commands_s[ci_time.TEST_ALL] == 7.0
        assert found.folders_s == {"router": 3.0} and found.fixed_work_s == 0.05
