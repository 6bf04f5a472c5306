"""What was measured beside an attack, and what is said of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from benchmarks.attack.target import Finding

# A stall is reported, and counts as broken when it is so much longer than what the machine does without an attack.
MAX_STALL_S = 1.0

HEAD = f"{'attack':44} {'verdict':8} {'silence':>9} {'health':>9} {'memory':>16}  what it saw"


@dataclass(frozen=True)
class Watched:
    """By the victim, in a process of its own."""

    # longest time without a token of a stream that is asked for, and longest answer of /health
    silence_s: float
    health_s: float
    num_tokens: int
    # answers of /health that were not 200
    num_unwell: int
    # what is wrong with streams: one that broke off, or said something else than without an attack
    wrong: list[str]


@dataclass(frozen=True)
class Measured:
    watched: Watched
    # resident memory of all processes: the most while it lasted, and three seconds later, beyond what it was
    grown_bytes: int
    kept_bytes: int
    # instance id of each process that is not the one that it was -> the process id that it had
    died: dict[str, int]
    is_up: bool
    # of /health, at the end
    last_status: int


def killed(finding: Finding) -> set[int]:
    """Process ids that the attack says it has killed."""
    return {int(pid) for pid in re.findall(r"\bkilled (\d+)\b", finding.detail)}


def objections(
    finding: Finding, measured: Measured, baseline: Watched, max_stall_s: float = MAX_STALL_S
) -> list[str]:
    """None: it held. `max_stall_s`: the seconds by which a silence may be longer than without an attack."""
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
        # what a death costs is measured elsewhere
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
