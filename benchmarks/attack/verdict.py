"""The measurements during an attack, and the verdict on them. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from benchmarks.attack.target import Finding

# A stall counts as broken if it exceeds the longest one without an attack by this many seconds.
MAX_STALL_S = 1.0

HEAD = f"{'attack':44} {'verdict':8} {'silence':>9} {'health':>9} {'memory':>16}  what it saw"


@dataclass(frozen=True)
class Watched:
    """What the victim saw, in its own process."""

    # The longest time without a token while a stream was open, and the slowest answer of /health.
    silence_s: float
    health_s: float
    num_tokens: int
    # Answers of /health with a status other than 200.
    num_unwell: int
    # Errors in streams: one that broke off, or had a different text than without an attack.
    wrong: list[str]


@dataclass(frozen=True)
class Measured:
    watched: Watched
    # How much the resident memory of all processes had grown, at most during the attack and three seconds after it.
    grown_bytes: int
    kept_bytes: int
    # Maps the instance id of each replaced process to its former process id.
    died: dict[str, int]
    is_up: bool
    # The status of /health at the end.
    last_status: int


def killed(finding: Finding) -> set[int]:
    """Returns the ids of the processes that the attack reports as killed."""
    return {int(pid) for pid in re.findall(r"\bkilled (\d+)\b", finding.detail)}


def objections(
    finding: Finding, measured: Measured, baseline: Watched, max_stall_s: float = MAX_STALL_S
) -> list[str]:
    """Returns an empty list if the server held. `max_stall_s`: how many seconds longer a silence may be than without an
    attack."""
    return list(_objections(finding, measured, baseline, killed(finding), max_stall_s))


def _objections(
    finding: Finding, measured: Measured, baseline: Watched, excused: Collection[int], max_stall_s: float
) -> Iterator[str]:
    if not finding.held:
        yield "the attack says so"
    if not measured.is_up:
        yield "the server is dead"
    if measured.last_status != 200:
        yield f"/health says {measured.last_status} at the end"
    for name, pid in measured.died.items():
        if pid not in excused:
            yield f"{name} died"
    yield from measured.watched.wrong
    if excused:
        # The cost of a process's death is measured elsewhere.
        return
    for what, seconds, before_s in (
        ("the victim heard nothing", measured.watched.silence_s, baseline.silence_s),
        ("/health took", measured.watched.health_s, baseline.health_s),
    ):
        if seconds > before_s + max_stall_s:
            yield f"{what} for {seconds:.2f} s" if "victim" in what else f"{what} {seconds:.2f} s"


def row(finding: Finding, measured: Measured, baseline: Watched) -> str:
    found = objections(finding, measured, baseline)
    watched = measured.watched
    memory = f"{_mib(measured.grown_bytes)} -> {_mib(measured.kept_bytes)} MiB"
    cells = f"{finding.name:44} {'BROKEN' if found else 'held':8} {figures(watched)} {memory:>16}  {finding.detail}"
    return "\n".join([cells, *(f"    BROKEN: {each}" for each in found)])


def figures(watched: Watched) -> str:
    return f"{watched.silence_s * 1e3:6.0f} ms {watched.health_s * 1e3:6.0f} ms"


def is_broken(rows: Iterable[tuple[Finding, Measured]], baseline: Watched) -> bool:
    return any(objections(finding, measured, baseline) for finding, measured in rows)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):+.0f}"
