"""The measurements during an attack, and the verdict on them. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from benchmarks.attack.target import Finding

# A stall counts as broken if it is this many times as long as the longest one just before the attack, and at least this
# many seconds, times the slack. A busy machine makes all of them longer.
MAX_STALL_RATIO, MAX_STALL_S = 5.0, 1.0
# How many times as long the calls of another key may take.
MAX_RATIO = 10.0

_COLUMNS = " ".join(f"{name:>9}" for name in ("silence", "without", "health", "without"))
HEAD = f"{'attack':44} {'verdict':8} {_COLUMNS} {'memory':>16}  what it saw"


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
    # Whether nothing of the attack was left on the server some seconds later.
    is_settled: bool = True
    # How many times as long as on a quiet machine the attacker's own work took.
    slack: float = 1.0
    # What the victim saw for some seconds after the attack.
    after: Watched | None = None


def killed(finding: Finding) -> set[int]:
    """Returns the ids of the processes that the attack reports as killed."""
    return {int(pid) for pid in re.findall(r"\bkilled (\d+)\b", finding.detail)}


def objections(
    finding: Finding, measured: Measured, baseline: Watched, hang_s: float | None = None
) -> list[str]:
    """Returns an empty list if the server held. `baseline` was seen before the attack. With `hang_s` no speed counts,
    but a silence of that many seconds does, which is a hang on any machine."""
    return list(_objections(finding, measured, baseline, killed(finding), hang_s))


def _objections(
    finding: Finding, measured: Measured, baseline: Watched, excused: Collection[int], hang_s: float | None
) -> Iterator[str]:
    if not finding.held:
        yield "the attack says so"
    if not measured.is_up:
        yield "the server is dead"
    if not measured.is_settled:
        yield "its requests are still on the server"
    if hang_s is None and finding.ratio is not None and finding.ratio > MAX_RATIO:
        yield f"another key's calls took {finding.ratio:.1f} times as long"
    if measured.last_status != 200:
        yield f"/health says {measured.last_status} at the end"
    for name, pid in measured.died.items():
        if pid not in excused:
            yield f"{name} died"
    yield from measured.watched.wrong
    if measured.after:
        yield from (f"{each}, after the attack" for each in measured.after.wrong)
        if measured.after.num_unwell:
            yield f"/health said {measured.after.num_unwell} times after the attack that something is wrong"
    if excused:
        # The cost of a process's death is measured elsewhere.
        return
    for watched in filter(None, (measured.watched, measured.after)):
        for what, seconds, before_s in (
            ("the victim heard nothing", watched.silence_s, baseline.silence_s),
            ("/health did not answer", watched.health_s, baseline.health_s),
        ):
            most_s = max(MAX_STALL_RATIO * before_s, MAX_STALL_S * measured.slack)
            if seconds > (most_s if hang_s is None else hang_s):
                yield f"{what} for {seconds:.2f} s, and {before_s:.2f} s before the attack"


def row(finding: Finding, measured: Measured, baseline: Watched, hang_s: float | None = None) -> str:
    found = objections(finding, measured, baseline, hang_s)
    watched = measured.watched
    detail = finding.detail
    if finding.ratio is not None:
        detail += f"; another key's calls took {finding.ratio:.1f} times as long"
    memory = f"{_mib(measured.grown_bytes)} -> {_mib(measured.kept_bytes)} MiB"
    verdict = "BROKEN" if found else "held"
    cells = f"{finding.name:44} {verdict:8} {figures(watched, baseline)} {memory:>16}  {detail}"
    return "\n".join([cells, *(f"    BROKEN: {each}" for each in found)])


def figures(watched: Watched, baseline: Watched) -> str:
    pairs = ((watched.silence_s, baseline.silence_s), (watched.health_s, baseline.health_s))
    return " ".join(f"{seconds * 1e3:6.0f} ms" for pair in pairs for seconds in pair)


def is_broken(rows: Iterable[tuple[Finding, Measured]], baseline: Watched) -> bool:
    return any(objections(finding, measured, baseline) for finding, measured in rows)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):+.0f}"
