"""Impossible options give a one-line error before any process is started."""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# They are imported here, since each fork would import them again.
import alignedserve.cli.restart
import alignedserve.cli.serve
import alignedserve.launch.serve  # noqa: F401
from alignedserve.cli.main import main
from alignedserve.launch import launcher
from alignedserve.launch.ports import free_port
from alignedserve.models.locate import Location, locate_model
from benchmarks.footprint import Footprint
from tests.launch.forked import in_a_fork
from tests.launch.server import POOL, message_of, starting, until


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
        line = f"Error: --port {port}: another program listens on it at 127.0.0.1\n"
        assert said("serve", "--port", str(port)) == (2, "", line)


def test_a_port_that_is_taken_while_the_model_is_found_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    port, kept = free_port("127.0.0.1"), list[socket.socket]()

    def slow(*given: Any) -> Location:
        kept.append(socket.create_server(("127.0.0.1", port)))
        return locate_model(*given)

    monkeypatch.setattr(launcher, "locate_model", slow)
    line = f"Error: --port {port}: another program listens on it at 127.0.0.1\n"
    assert said("serve", "--port", str(port)) == (2, "", line)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["/no/such/model"], "Error: model is '/no/such/model'; must be"),
        (["--log-dir", "/proc/none"], "Error: --log-dir /proc/none: No such file or directory"),
        (["--max-model-len", "100000"], "Error: --max-model-len 100000: the model was made for at most 2048"),
        (["--max-num-seqs", "0"], "Error: --max-num-seqs 0: must be an integer, at least 1"),
        (["--be-share", "5"], "Error: --be-share 5.0: must be in [0, 1)"),
        (["--slo-ttft-ms", "-1"], "Error: --slo-ttft-ms -1.0: must be 0 or from 1 to 600000"),
        (["--state-dir", "/etc/hostname"], "Error: --state-dir /etc/hostname: is a file; give a directory"),
    ],
)
def test_what_is_wrong_is_one_line(options: list[str], message: str) -> None:
    code, out, err = said("serve", *options)
    assert (code, out) == (2, "")
    assert err.startswith(message) and err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--log-level", "debgu"],
            "'debgu' is not one of debug, info, warning, error; did you mean 'debug'?",
        ),
        (["--dtype", "int3"], "'int3' is not one of auto, float32"),
        (["--policy", "alignd"], "or package.module:Class; did you mean 'aligned'?"),
    ],
)
def test_a_word_that_is_unknown_is_refused_with_the_known_ones(options: list[str], message: str) -> None:
    code, out, err = said("serve", *options)
    assert (code, out) == (2, "")
    assert f"Error: Invalid value for '{options[0]}': " in err and message in err


def test_where_no_system_is_there_is_none_to_restart() -> None:
    code, _, err = said("restart", "--port", "1")
    assert code == 1 and "no server of yours on 127.0.0.1:1" in err


SLOW = {"torch", "ray", "numpy", "fastapi", "redis"}


@pytest.mark.parametrize(
    "options",
    [
        ["--port", "70000"],
        ["--gateways", "0"],
        ["--colocated-instances", "1", "--decode-instances", "1"],
        ["--host", "192.0.2.1"],
        ["--log-dir", "/proc/none"],
    ],
    ids=" ".join,
)
def test_values_are_checked_before_anything_slow_is_imported(options: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "alignedserve", "serve", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    imported = {
        line.rpartition("|")[2].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert done.returncode == 2 and "Error: --" in done.stderr
    assert "alignedserve.launch.settings" in imported and not imported & SLOW


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
        assert server.wait() == 2
        assert "gcs_server" in programs
        first, line, *others = [each for each in server.lines if " is up after " not in each]
        assert first.startswith("starting AlignedServe ")
        assert line.startswith("Error: --pool-memory-bytes 1152921504606846976: ") and not others
        footprint.check_gone()


@pytest.mark.slow
@pytest.mark.drawn(one_in=3)
def test_a_second_server_at_the_port_is_one_line_while_the_first_one_starts() -> None:
    with starting(*POOL) as server:
        for moment in ("^starting AlignedServe", "^Ray is up", "^router is up"):
            server.until_said(moment)
            done = run("--port", str(server.port), "--host", "127.0.0.1")
            assert (done.returncode, done.stdout) == (2, "")
            why = "another (server is starting or stopping|program listens) on it at 127.0.0.1"
            assert re.fullmatch(f"Error: --port {server.port}: {why}\n", message_of(done.stderr))
        server.until_ready()


def test_a_cluster_that_cannot_be_joined_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    done = run("--address", "127.0.0.1:1")
    assert done.returncode == 2
    assert message_of(done.stderr).startswith("Error: --address 127.0.0.1:1: ")
    assert done.stderr.count("\n") == 1
