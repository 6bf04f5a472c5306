"""Limits of the container: control groups of version 1 or 2. None means no limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cpu_quota(root: Path = ROOT, own: Path = OWN) -> float | None:
    """Returns the CPU time that this process may use, in cores."""
    found = []
    for folder in _folders("cpu", root, own):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        quota = quota or _read(folder / "cpu.cfs_quota_us")
        period = period or _read(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():
            found.append(int(quota) / int(period))
    return min(found, default=None)


def num_free_bytes(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Returns the bytes of memory that this process may still use. Cached files do not count as used."""
    found = []
    for folder in _folders("memory", root, own):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if limit.isdecimal() and used.isdecimal():
            found.append(int(limit) - int(used) + _num_cached(_read(folder / "memory.stat")))
    return min(found, default=None)


def _num_cached(stat: str) -> int:
    values = dict(line.split() for line in stat.splitlines() if len(line.split()) == 2)
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def _folders(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Yields the visible folders of this process's group and of the groups around it."""
    for line in _read(own).splitlines():
        number, controllers, name = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        top = root if number == "0" else root / controller
        inside = top / name.strip("/")
        yield from (folder for folder in (inside, *inside.parents) if folder.is_relative_to(top))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
