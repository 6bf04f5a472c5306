"""What a running server has of files, memory, sockets and ports; and what of that another user can get at."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from alignedserve.launch.leftovers import descendants

# where a server makes directories and memory of its own; who can read there reads prompts
_OWN = ("/tmp/alignedserve-", "/dev/shm/alignedserve-")
_LISTENS = "0A"


@dataclass(frozen=True)
class Surface:
    # files, directories and Unix sockets
    paths: frozenset[Path]
    # of those, what is the server's alone, for nobody else to read either
    private: frozenset[Path]
    # where it listens, on whatever address
    ports: frozenset[int]


def surface_of(launcher: int, state_dir: Path | None = None) -> Surface:
    pids = [launcher, *(pid for pid, _ in descendants(launcher))]
    used = {path for pid in pids for path in _files_of(pid)} | set(_unix_sockets(pids))
    tops = {_top(path) for path in used if str(path).startswith(_OWN)}
    private = {path for top in tops | ({state_dir} if state_dir else set()) for path in _below(top)}
    return Surface(frozenset(used | private), frozenset(private), frozenset(tcp_ports(pids)))


def reached(surface: Surface) -> list[str]:
    """What this process can write, connect to, or read although it is private. Changes nothing."""
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
    """Open, or mapped."""
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
    """The server's own directory, or its memory itself."""
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
