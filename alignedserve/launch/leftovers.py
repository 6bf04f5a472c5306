"""What must not outlive the system: a directory, shared memory, processes.

Files are removed by a child that waits for its input to end: that happens when this process ends, however it ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# A process that was told to end, and has not by then, is killed.
_END_S = 5.0
_POLL_S = 0.05

# Ray's processes may still be writing when this process was killed: a few attempts.
_REMOVE = """
while read -r line; do :; done
for attempt in 1 2 3 4 5 6 7 8 9 10; do
  rm -rf -- "$1" && rm -f -- /dev/shm/"$2"-* && exit 0
  sleep 0.5
done
"""


@contextmanager
def removing(prefix: str) -> Iterator[Path]:
    """A new temporary directory. At the end it is gone, and shared memory whose name begins with `prefix` too.

    Directly in /tmp: Ray puts sockets into it, whose paths must be short.
    """
    directory = Path(tempfile.mkdtemp(prefix="alignedserve-", dir="/tmp"))
    shell = shutil.which("sh") or "/bin/sh"
    command = [shell, "-c", _REMOVE, "sh", str(directory), prefix]
    # in a session of its own: a ctrl-C in the terminal is not for it
    remover = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield directory
    finally:
        assert remover.stdin
        remover.stdin.close()
        remover.wait()


def descendants(pid: int) -> list[tuple[int, int]]:
    """(process id, start time) of children, their children, and so on: as a pair, not to be mistaken for another."""
    children: dict[int, list[tuple[int, int]]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        if status := _status(int(path.name)):
            parent, start = status
            children.setdefault(parent, []).append((int(path.name), start))
    found, open_ones = [], [pid]
    while open_ones:
        mine = children.get(open_ones.pop(), [])
        found += mine
        open_ones += [child for child, _ in mine]
    return found


def end(processes: set[tuple[int, int]]) -> None:
    """Waits until they have ended, and kills those that don't."""
    deadline = time.monotonic() + _END_S
    while alive := {each for each in processes if _is_alive(*each)}:
        if time.monotonic() > deadline:
            for pid, _ in alive:
                os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + _END_S
        time.sleep(_POLL_S)


def _is_alive(pid: int, start: int) -> bool:
    status = _status(pid)
    return status is not None and status[1] == start


def _status(pid: int) -> tuple[int, int] | None:
    """Parent and start time; None for one that is gone, or dead and only waited for."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # the name, in parentheses, may hold anything
    state, parent, *rest = text.rpartition(")")[2].split()
    return None if state in "ZX" else (int(parent), int(rest[17]))
