"""Finds the processes of a server by role, from outside, because they exist before they are connected."""

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

# Class of the actor, which Ray puts into the process's title -> role.
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
    # Start time, because a pid may be reused.
    start: int

    @property
    def is_alive(self) -> bool:
        return self._state() not in ("", "Z", "X")

    @property
    def is_stopped(self) -> bool:
        return self._state() == "T"

    def signal(self, number: signal.Signals) -> None:
        """Sends the signal. Does nothing if the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.is_alive:
                os.kill(self.pid, number)

    def _state(self) -> str:
        """Returns the process's state; empty if it is gone or its pid was reused."""
        try:
            rest = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        return rest[0] if int(rest[19]) == self.start else ""


def processes_of(launcher: int) -> list[Process]:
    """Returns all processes of the launcher. Those without a role are "other"."""
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
    """Memory of one process, without shared memory."""

    role: str
    pid: int
    num_bytes: int


def memory_of(launcher: int) -> list[Memory]:
    found = [Memory("launcher", launcher, own_bytes(launcher))]
    return found + [Memory(each.role, each.pid, own_bytes(each.pid)) for each in processes_of(launcher)]


def segments_beside(paths: Iterable[Path]) -> set[Path]:
    """Returns the shared memory with this server's names, including that of a pool that has died."""
    prefixes = {"-".join(path.name.split("-")[:2]) for path in paths if path.parent == SHARED_MEMORY}
    return {path for prefix in prefixes for path in SHARED_MEMORY.glob(f"{prefix}-*")}
