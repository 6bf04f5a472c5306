"""`alignedserve run`: a server and a chat with it in one command. Nothing of it outlives the command."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from alignedserve.launch.leftovers import descendants
from alignedserve.launch.ports import free_port
from tests.cli.forked import forked
from tests.cli.terminal import CTRL_D, Terminal

LIMIT_S = 60.0


@pytest.mark.slow
def test_a_question_is_answered_by_a_server_of_its_own() -> None:
    done = forked("run", "demo", "-q", "Count from 7 to 12.", "--dtype", "float32")
    assert (done.returncode, done.stdout, done.stderr) == (0, "7, 8, 9, 10, 11, 12\n", "")


@pytest.mark.slow
def test_in_a_terminal_it_is_a_chat_that_ends_with_the_server() -> None:
    at = Terminal("run", "demo", "--dtype", "float32")
    at.until("demo at ")
    at.until("> ")
    at.type("Count from 7 to 12.\r")
    at.until("7, 8, 9, 10, 11, 12")
    at.until("> ")
    at.type(CTRL_D)
    assert at.end() == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_its_server_ends_however_it_ends(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "alignedserve", "run", "demo", "--dtype", "float32"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # pytest may have been started under nohup.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    ) as process:
        assert process.stdin and process.stdout
        process.stdin.write("Count from 7 to 12.\n")
        process.stdin.flush()
        assert process.stdout.readline() == "7, 8, 9, 10, 11, 12\n"
        started = descendants(process.pid)
        (state,) = [word for word in words_of(started) if word.startswith("/tmp/own-")]
        assert Path(state).exists()
        process.send_signal(number)
        process.wait()
    # A killed process can't remove anything.
    assert number == signal.SIGKILL or not Path(state).exists()
    deadline = time.monotonic() + LIMIT_S
    while any(_is_there(pid, start) for pid, start in started):
        assert time.monotonic() < deadline, "some processes are left"
        time.sleep(0.05)


def words_of(processes: Iterable[tuple[int, int]]) -> Iterator[str]:
    """The arguments of the first one, which is `serve`."""
    pid, _ = next(iter(processes))
    return iter(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))


def _is_there(pid: int, start: int) -> bool:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) == start
    except OSError:
        return False


def test_what_is_wrong_is_said_before_a_server_is_started(tmp_path: Path) -> None:
    for words, said in (
        (["nope"], "model is 'nope'"),
        (["demo", "--prefil", "3"], "No such option '--prefil'"),
        (["demo", "-q", " "], "-q: give a question"),
        ([str(tmp_path)], "holds no config.json"),
    ):
        done = forked("run", *words)
        assert done.returncode and said in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.slow
def test_it_asks_its_server_and_no_proxy(tmp_path: Path) -> None:
    """Nothing listens at the proxy's port, and what is no key of this server is not sent."""
    proxies = {
        name: f"http://127.0.0.1:{free_port('127.0.0.1')}"
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY")
    }
    words = ["run", "demo", "-q", "Count from 7 to 12.", "--dtype", "float32"]
    done = forked(
        *words, environment=proxies | {"no_proxy": "", "NO_PROXY": "", "OPENAI_API_KEY": "not a key"}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "7, 8, 9, 10, 11, 12\n", "")


@pytest.mark.slow
def test_its_server_may_need_a_key() -> None:
    done = forked("run", "demo", "-q", "Count from 7 to 12.", "--dtype", "float32", "--api-key", "secret")
    assert (done.returncode, done.stdout, done.stderr) == (0, "7, 8, 9, 10, 11, 12\n", "")


@pytest.mark.slow
def test_the_lines_of_a_server_that_does_not_start_are_shown() -> None:
    done = forked("run", "demo", "-q", "x", "--kv-cache-memory-bytes", "1")
    assert done.returncode == 1 and "the server did not start" in done.stderr
    assert "kv" in done.stderr.lower(), done.stderr
