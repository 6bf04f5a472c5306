"""Records a server's processes and files, and what is left of them after it has ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

from alignedserve.launch.leftovers import descendants

# Ray's agents may take a minute where the processors are busy.
GONE_S = 60.0
_LOOK_S = 0.05


class Footprint:
    """All processes and files of a running server that were present whenever it was noted."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.processes = {(pid, start) for p, start in descendants(os.getpid()) if p == pid}
        self.paths: set[Path] = set()
        self.note()

    def note(self) -> None:
        self.processes |= set(descendants(self._pid))
        paths = {path for pid, _ in self.processes for path in files_of(pid)}
        self.paths |= {path for path in paths if path.exists()}

    def left(self, timeout_s: float = GONE_S) -> list[str]:
        """Returns what is still present after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while (found := self._found()) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return found

    def check_gone(self) -> None:
        found = self.left()
        assert not found, f"left behind: {found}"

    def _found(self) -> list[str]:
        alive = {each for each in self.processes if start_of(each[0]) == each[1]}
        return [*map(str, alive), *(str(path) for path in self.paths if path.exists())]


def files_of(pid: int) -> set[Path]:
    """Returns a process's own files among those it has mapped or open: in /dev/shm, and directories in /tmp."""
    try:
        mapped = {line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
        opened = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        return set()
    found = {Path(name) for name in mapped | opened if name.startswith("/dev/shm/alignedserve-")}
    in_tmp = {name.split("/")[2] for name in mapped | opened if name.startswith("/tmp/alignedserve-")}
    return found | {Path("/tmp") / name for name in in_tmp}


def start_of(pid: int) -> int | None:
    """Returns the process's start in clock ticks; None if there is no such process, or it is a zombie."""
    try:
        rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if rest[0] in "ZX" else int(rest[19])
