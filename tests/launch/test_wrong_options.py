"""Impossible options give a one-line error before any process is started."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# They are imported here, since each fork would import them again.
import alignedserve.cli.restart
import alignedserve.cli.serve
import alignedserve.launch.serve  # noqa: F401
from alignedserve.cli.main import main
from benchmarks.footprint import Footprint
from tests.launch.forked import in_a_fork
from tests.launch.server import message_of, starting, until


def said(*words: str) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a command."""
    return in_a_fork(_run, words)


def _run(words: tuple[str, ...]) -> tuple[int, str, str]:
    sys.argv = ["alignedserve", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
    return code, out.getvalue(), message_of(err.getvalue())


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Directly in /tmp: a socket's path must be short."""
    with tempfile.TemporaryDirectory(prefix="state-", dir="/tmp") as directory:
        monkeypatch.setenv("XDG_STATE_HOME", directory)
        yield


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = f"Error: port={port}: another program listens on it at 127.0.0.1\n"
        assert said("serve", "--port", str(port)) == (1, "", line)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["/no/such/model"], "Error: model is '/no/such/model'; must be"),
        (["--log-level", "loud"], "Error: log_level='loud': must be one of debug, info, warning, error"),
        (["--log-dir", "/proc/none"], "Error: log_dir='/proc/none': No such file or directory"),
        (["--dtype", "int3"], "Error: dtype='int3': must be one of"),
        (["--policy", "best"], "Error: policy='best': must be one of aligned, priority, fcfs"),
        (["--max-model-len", "100000"], "Error: max_model_len=100000: the model was made for at most 2048"),
    ],
)
def test_what_is_wrong_is_one_line(options: list[str], message: str) -> None:
    code, out, err = said("serve", *options)
    assert (code, out) == (1, "")
    assert err.startswith(message) and err.count("\n") == 1


def test_where_no_system_is_there_is_none_to_restart() -> None:
    code, _, err = said("restart", "--port", "1")
    assert code == 1 and "no system of this user's serves 127.0.0.1:1" in err


# ---- what is found when Ray is there, in processes of their own ----


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "alignedserve", "serve", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)


@pytest.mark.slow
@pytest.mark.drawn(one_in=3)
def test_a_pool_that_is_too_large_is_one_line_and_ray_is_stopped() -> None:
    with starting("--pool-memory-bytes", str(1 << 60)) as server:
        footprint = Footprint(server.pid)
        programs = set[str]()

        def is_over() -> bool:
            programs.update(server.programs())
            footprint.note()
            return not server.is_running

        until(is_over, lambda: server.output)
        assert server.wait() == 1
        assert "gcs_server" in programs
        line, *others = [each for each in server.lines if " is up after " not in each]
        assert line.startswith("Error: pool_memory_bytes=1152921504606846976: ") and not others
        footprint.check_gone()


def test_a_cluster_that_cannot_be_joined_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    done = run("--address", "127.0.0.1:1")
    assert done.returncode == 1
    assert message_of(done.stderr).startswith("Error: address='127.0.0.1:1': ")
    assert done.stderr.count("\n") == 1
