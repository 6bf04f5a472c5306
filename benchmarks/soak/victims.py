"""The processes of a server by role, found from outside: they are there before anybody is connected to them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from alignedserve.launch.leftovers import descendants
from alignedserve.store.server import NAMES
from benchmarks.attack.processes import own_bytes

# the class of its actor, which Ray puts into a process's title
ROLES = {
    "RouterActor": "router",
    "PoolActor": "kvpool",
    "PrefillActor": "prefill",
    "DecodeActor": "decode",
    "ColocatedActor": "colocated",
    "GatewayActor": "gateway",
}
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Process:
    role: str
    pid: int
    # an id alone may be another process's later
    start: int

    @property
    def is_alive(self) -> bool:
        return self._state() not in ("", "Z", "X")

    @property
    def is_stopped(self) -> bool:
        return self._state() == "T"

    def signal(self, number: signal.Signals) -> None:
        """Nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.is_alive:
                os.kill(self.pid, number)

    def _state(self) -> str:
        """Empty: it is gone, or the id is another one's."""
        try:
            rest = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        return rest[0] if int(rest[19]) == self.start else ""


def processes_of(launcher: int) -> list[Process]:
    """Those with a role; what belongs to none of them is "other"."""
    return [Process(_role(pid), pid, start) for pid, start in descendants(launcher)]


def _role(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return "other"
    if name in NAMES:
        return "store"
    actor = title.removeprefix("ray::").split(".")[0] if title.startswith("ray::") else ""
    return ROLES.get(actor, "other")


@dataclass(frozen=True)
class Memory:
    """Of one process; without shared memory."""

    role: str
    pid: int
    num_bytes: int


def memory_of(launcher: int) -> list[Memory]:
    found = [Memory("launcher", launcher, own_bytes(launcher))]
    return found + [Memory(each.role, each.pid, own_bytes(each.pid)) for each in processes_of(launcher)]


def segments_beside(paths: Iterable[Path]) -> set[Path]:
    """What there is of shared memory with the names that this server gives, of a pool that died too."""
    prefixes = {"-".join(path.name.split("-")[:2]) for path in paths if path.parent == SHARED_MEMORY}
    return {path for prefix in prefixes for path in SHARED_MEMORY.glob(f"{prefix}-*")}
