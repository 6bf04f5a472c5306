"""How a process of this host ended: its exit status or signal, and perhaps that memory ran out.

The launcher is not the parent of the processes that Ray starts, so it can't wait for them. It holds a descriptor of
each (pidfd), from which Linux 6.15 and later tell the status after the end. Earlier kernels tell only that it ended.

The kernel counts the processes that it kills for lack of memory, by cgroup. If the count has risen since a process was
first seen and it ended by signal 9, it may be one of those. Another process of the cgroup may be it instead, and under
systemd all are in one. So each kill explains one death only.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import threading
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
_OOM = "perhaps out of memory"


class _ExplainedKills:
    """The kills of each counter that explain a death already. The processes of a cgroup share them."""

    def __init__(self) -> None:
        self._counts: dict[Path, int] = {}
        self._lock = threading.Lock()

    def explain(self, counter: Path, num_before: int) -> bool:
        """Returns whether a kill after the first `num_before` ones explains no death yet. It then explains this one."""
        with self._lock:
            num_explained = max(num_before, self._counts.get(counter, 0))
            if _num_oom_kills(counter) <= num_explained:
                return False
            self._counts[counter] = num_explained + 1
            return True


_EXPLAINED = _ExplainedKills()


class ExitWatch:
    """Watches one process from when it is known until after its end."""

    def __init__(self, pid: int) -> None:
        self._counter = _oom_counter(pid, CGROUPS)
        self._num_oom_kills = _num_oom_kills(self._counter)
        try:
            self._descriptor: int | None = os.pidfd_open(pid)
        except OSError:
            self._descriptor = None
        else:
            # Also closes it when this object is dropped, which a thread may still use for `result`.
            self._closing = weakref.finalize(self, os.close, self._descriptor)

    def result(self) -> str | None:
        """Returns how the process ended; None if it runs, or if that can't be known. Called once for each process.
        Blocks for half a second at most."""
        if self._descriptor is None or not _has_ended(self._descriptor):
            return None
        status = _status(self._descriptor)
        is_killed = status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)
        is_oom = is_killed and _EXPLAINED.explain(self._counter, self._num_oom_kills)
        if status is None:
            return _OOM if is_oom else None
        return f"{_words(status)}, {_OOM}" if is_oom else _words(status)

    def close(self) -> None:
        if self._descriptor is not None:
            self._closing()
            self._descriptor = None


def _has_ended(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(_WAIT_MS))


def _status(descriptor: int) -> int | None:
    """Returns the status of a process that has ended, as os.wait does; None if the kernel is too old."""
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


def _oom_counter(pid: int, root: Path) -> Path:
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
