"""How a process of this host ended: its exit status or signal, and whether the kernel ran out of memory.

The launcher is not the parent of the processes that Ray starts, so it can't wait for them. It holds a descriptor of
each (pidfd), from which Linux 6.15 and later tell the status after the end. Earlier kernels tell only that it ended.

The kernel counts the processes that it kills for lack of memory, by cgroup. A count that has risen since the process
was first seen, together with signal 9, means that it was one of them.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import weakref
from pathlib import Path

# struct pidfd_info of Linux: `mask` is the first field and `exit_code` the last of its first version.
_INFO = struct.Struct("=QQ11Ii")
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_INFO_EXIT = 1 << 3
# The connections of a process close a moment before it has ended.
_WAIT_MS = 500
CGROUPS = Path("/sys/fs/cgroup")
_COUNT = "oom_kill "


class ExitWatch:
    """Watches one process from when it is known until after its end."""

    def __init__(self, pid: int) -> None:
        self._counter = _oom_counter(pid)
        self._num_oom_kills = _num_oom_kills(self._counter)
        try:
            self._descriptor: int | None = os.pidfd_open(pid)
        except OSError:
            self._descriptor = None
        else:
            # Also closes it when this object is dropped, which a thread may still use for `result`.
            self._closing = weakref.finalize(self, os.close, self._descriptor)

    def result(self) -> str | None:
        """Returns how the process ended; None if it runs, or if that can't be known. Blocks for half a second at
        most."""
        status = None if self._descriptor is None else _status(self._descriptor)
        is_killed = status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)
        is_oom = is_killed and _num_oom_kills(self._counter) > self._num_oom_kills
        if status is None:
            # Another process of the same cgroup may be the one that was killed.
            return "perhaps out of memory" if is_oom else None
        return f"{_words(status)}, out of memory" if is_oom else _words(status)

    def close(self) -> None:
        if self._descriptor is not None:
            self._closing()
            self._descriptor = None


def _status(descriptor: int) -> int | None:
    """Returns the status of a process that has ended, as os.wait does; None if it runs or the kernel is too old."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(_WAIT_MS):
        return None
    try:
        found = fcntl.ioctl(descriptor, _GET_INFO, _INFO.pack(_INFO_EXIT, *[0] * 12, 0))
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(found)
    return status if mask & _INFO_EXIT else None


def _words(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"exit status {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _oom_counter(pid: int, root: Path = CGROUPS) -> Path:
    """Returns the file that counts the kernel's kills in the cgroup of the process, or on the whole machine."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for number, controllers, path in (line.split(":", 2) for line in lines):
        file = None
        if "memory" in controllers.split(","):
            file = root / "memory" / path.lstrip("/") / "memory.oom_control"
        elif number == "0":
            file = root / path.lstrip("/") / "memory.events"
        if file is not None and _COUNT in _text(file):
            return file
    return Path("/proc/vmstat")


def _num_oom_kills(counter: Path) -> int:
    counts = [line for line in _text(counter).splitlines() if line.startswith(_COUNT)]
    return int(counts[0].split()[1]) if counts else 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
