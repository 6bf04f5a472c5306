"""Another version is installed while a system runs, and then its processes are replaced."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import alignedserve
from tests.launch.restarting import command_of, restart
from tests.launch.server import POOL, START_S, Server, serving, until


class Installation:
    """The package as it is, but for its version."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        source = Path(alignedserve.__file__).parent
        self._package = directory / "alignedserve"
        self._package.mkdir()
        for path in source.iterdir():
            if path.name == "__main__.py":
                shutil.copy(path, self._package)
            elif path.name not in ("__init__.py", "version.py", "__pycache__"):
                (self._package / path.name).symlink_to(path.resolve())
        shutil.copy(source / "__init__.py", self._package)
        self._text = (source / "version.py").read_text()
        self.install(alignedserve.__version__)

    def install(self, version: str) -> None:
        now = re.sub(r'__version__ = ".*"', f'__version__ = "{version}"', self._text)
        (self._package / "version.py").write_text(now)


def other(patch: bool) -> str:
    major, minor, third = alignedserve.__version__.split(".")
    return f"{major}.{minor}.{int(third) + 7}" if patch else f"{major}.{int(minor) + 1}.0"


def metric_lines(server: Server, name: str) -> list[str]:
    return [line for line in server.get("/metrics").text.splitlines() if line.startswith(f"{name}{{")]


@pytest.mark.slow
def test_a_version_that_is_too_different_replaces_nothing_and_the_next_patch_all(tmp_path: Path) -> None:
    installed = Installation(tmp_path)
    with serving(*POOL, cwd=tmp_path) as server:
        pids = {each["instance_id"]: each["pid"] for each in server.processes()}
        installed.install(other(patch=False))
        refused = subprocess.run(command_of(server), capture_output=True, text=True, timeout=START_S)
        assert refused.returncode == 1
        assert (
            f"version {other(patch=False)} is installed on this host, and {alignedserve.__version__} runs; "
            "versions work together if they differ only in the third number"
        ) in refused.stdout
        assert {each["instance_id"]: each["pid"] for each in server.processes()} == pids
        installed.install(other(patch=True))
        restart(server)
        until(
            lambda: (
                f'version="{other(patch=True)}"' in "".join(metric_lines(server, "alignedserve:build_info"))
            )
        )
        server.until_whole()
        answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 3})
        assert answer.status_code == 200
        assert not {each["pid"] for each in server.processes()} & set(pids.values())
        measured = metric_lines(server, "alignedserve:process_resident_memory_bytes")
        assert len(measured) == len(pids)
        assert all(float(line.split()[-1]) > 10 << 20 for line in measured)
