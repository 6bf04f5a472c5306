"""A running server's files, memory, sockets and ports, and which of these another user can access."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from alignedserve.launch.leftovers import descendants

# Where a server makes its own directories and memory. Users that can read there can read prompts.
_OWN = ("/tmp/alignedserve-", "/dev/shm/alignedserve-")
_LISTENS = "0A"


@dataclass(frozen=True)
class Surface:
    # Files, directories and Unix sockets.
    paths: frozenset[Path]
    # Those of `paths` that only the server's user may read.
    private: frozenset[Path]
    # Ports it listens on, at any address.
    ports: frozenset[int]


def surface_of(launcher: int, state_dir: Path | None = None) -> Surface:
    pids = [launcher, *(pid for pid, _ in descendants(launcher))]
    used = {path for pid in pids for path in _files_of(pid)} | set(_unix_sockets(pids))
    tops = {_top(path) for path in used if str(path).startswith(_OWN)}
    private = {path for top in tops | ({state_dir} if state_dir else set()) for path in _below(top)}
    return Surface(frozenset(used | private), frozenset(private), frozenset(tcp_ports(pids)))


def reached(surface: Surface) -> list[str]:
    """Returns what this process can write or connect to, and the private paths it can read. Changes nothing."""
    found = []
    for path in sorted(surface.paths):
        try:
            mode = path.stat().st_mode
        except OSError:
            continue
        if stat.S_ISDIR(mode) and os.access(path, os.W_OK | os.X_OK):
            found.append(f"{path}: can be written in")
        elif stat.S_ISSOCK(mode) and _connects(path):
            found.append(f"{path}: can be connected to")
        elif stat.S_ISREG(mode) and os.access(path, os.W_OK):
            found.append(f"{path}: can be written")
        elif stat.S_ISREG(mode) and path in surface.private and os.access(path, os.R_OK):
            found.append(f"{path}: can be read")
    return found


def tcp_ports(pids: Iterable[int]) -> set[int]:
    inodes = set(_socket_inodes(pids))
    ports = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            row = line.split()
            if row[3] == _LISTENS and row[9] in inodes:
                ports.add(int(row[1].rpartition(":")[2], 16))
    return ports


def _files_of(pid: int) -> Iterator[Path]:
    """Yields files that are open or mapped."""
    try:
        mapped = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        names = [row[5] for row in mapped if len(row) == 6]
        names += [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return
    yield from (Path(name) for name in names if name.startswith("/") and not name.endswith(" (deleted)"))


def _unix_sockets(pids: Iterable[int]) -> Iterator[Path]:
    inodes = set(_socket_inodes(pids))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        row = line.split(maxsplit=7)
        if len(row) == 8 and row[6] in inodes and row[7].startswith("/"):
            yield Path(row[7])


def _socket_inodes(pids: Iterable[int]) -> Iterator[str]:
    for pid in pids:
        try:
            links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        yield from (link[8:-1] for link in links if link.startswith("socket:["))


def _top(path: Path) -> Path:
    """Returns the server's own directory or memory segment that contains the path."""
    depth = 3 if str(path).startswith("/tmp/") else 4
    return Path(*path.parts[:depth])


def _below(top: Path) -> Iterator[Path]:
    yield top
    for directory, names, files in os.walk(top):
        yield from (Path(directory) / name for name in [*names, *files])


def _connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(1)
        try:
            sock.connect(str(path))
        except OSError:
            return False
    return True
