"""Removes what must not outlive the system: a directory, shared memory and processes.

A child process does it. It waits for the end of its input, which is closed when this process ends for any reason.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from alignedserve.process.private_files import kept

# seconds that a process gets to end before it is killed
_END_S = 5.0
_POLL_S = 0.05

# The child reads lines of (process id, start time). If this process was killed, those processes may still be ending
# (Ray's agents take more than a minute) and writing, so the child tries a few times.
_REMOVE = """
noted=
while read -r pid start; do noted="$noted $pid:$start"; done
for attempt in 1 2 3 4 5 6 7 8 9 10; do
  for each in $noted; do
    read -r status 2>/dev/null < /proc/"${each%:*}"/stat || continue
    set -- "$1" "$2" ${status##*)}
    [ "${22}" = "${each#*:}" ] && kill -9 "${each%:*}"
  done 2>/dev/null
  rm -rf -- "$1" && rm -f -- /dev/shm/"$2"-* && exit 0
  sleep 0.5
done
"""


class Leftovers:
    def __init__(self, directory: Path, prefix: str, remover: subprocess.Popen[bytes]) -> None:
        self.directory = directory
        self.prefix = prefix
        self._remover = remover
        # the child processes that existed before, and the remover
        self._before = descendants(os.getpid())

    def note_processes(self) -> None:
        """Notes all descendants that this process has started since, so that they do not outlive it."""
        self._note(descendants(os.getpid(), self._before))

    def note_process(self, pid: int) -> None:
        """Notes a process that was just started, so that it does not outlive this one."""
        if status := _status(pid):
            self._note([(pid, status[1])])

    def _note(self, processes: list[tuple[int, int]]) -> None:
        assert self._remover.stdin
        for pid, start in processes:
            self._remover.stdin.write(b"%d %d\n" % (pid, start))
        self._remover.stdin.flush()


@contextmanager
def removing(prefix: str) -> Iterator[Leftovers]:
    """Makes a temporary directory, which no program that cleans /tmp removes. At the end it is removed, with all shared
    memory that has a name beginning with `prefix`.

    The directory is directly in /tmp, because Ray puts sockets into it, and their paths must be short.
    """
    directory = Path(tempfile.mkdtemp(prefix="alignedserve-", dir="/tmp"))
    shell = shutil.which("sh") or "/bin/sh"
    command = [shell, "-c", _REMOVE, "sh", str(directory), prefix]
    # It has its own session, so that a Ctrl-C in the terminal does not reach it.
    remover = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        with kept(directory):
            yield Leftovers(directory, prefix, remover)
    finally:
        assert remover.stdin
        remover.stdin.close()
        remover.wait()


def descendants(pid: int, besides: Collection[tuple[int, int]] = ()) -> list[tuple[int, int]]:
    """Returns (process id, start time) of all descendants, except `besides` and theirs. The start time tells a process
    from a later one with the same id."""
    children: dict[int, list[tuple[int, int]]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        if status := _status(int(path.name)):
            parent, start = status
            children.setdefault(parent, []).append((int(path.name), start))
    found, open_ones = [], [pid]
    while open_ones:
        mine = [child for child in children.get(open_ones.pop(), []) if child not in besides]
        found += mine
        open_ones += [child for child, _ in mine]
    return found


def end(processes: set[tuple[int, int]]) -> None:
    """Waits until the processes have ended, and kills those that don't."""
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
    """Returns the parent and the start time; None for a process that has ended, also if nothing has waited for it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may contain anything.
    state, parent, *rest = text.rpartition(")")[2].split()
    return None if state in "ZX" else (int(parent), int(rest[17]))
