"""A function in a fork has a limit."""

from __future__ import annotations

import multiprocessing
import subprocess
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.launch.forked import in_a_fork
from tests.launch.server import until

FOREVER = ["sleep", "1000000"]


def hang(sender: Connection) -> None:
    """Starts another process, and waits for it."""
    with subprocess.Popen(FOREVER, start_new_session=True) as process:
        sender.send(process.pid)


def leave_a_thread() -> int:
    threading.Thread(target=threading.Event().wait).start()
    return 7


@pytest.mark.slow
def test_what_never_returns_is_killed_with_what_it_started() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with pytest.raises(TimeoutError, match="still runs after 5 s"):
        in_a_fork(hang, sender, limit_s=5.0)
    assert receiver.poll(0)
    pid = receiver.recv()
    until(lambda: state_of(pid) in ("Z", ""))


def state_of(pid: int) -> str:
    """Z for a process that is dead and not waited for yet, nothing for one that is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    return ""


@pytest.mark.slow
def test_what_returns_and_does_not_end_is_killed() -> None:
    with pytest.raises(TimeoutError, match="has returned, and runs 5 s later"):
        in_a_fork(leave_a_thread, limit_s=5.0)
