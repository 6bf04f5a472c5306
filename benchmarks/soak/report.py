"""The report of a run: the tables' arithmetic, pure, and soak.json and soak.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import heading, table, write_page
from benchmarks.soak.faults import Fault
from benchmarks.soak.tally import Tally
from benchmarks.soak.victims import Memory

# Allowed growth of a process: allocators keep memory, and caches fill up.
MAX_GROWTH, MAX_GROWN_BYTES = 1.5, 128 << 20
# The most failures on the page. soak.json has all.
MAX_SHOWN = 20
LABELS = {"together": "two at once", "again": "again while it recovers"}


@dataclass(frozen=True)
class Spread:
    median: float
    longest: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(median(values), max(values)) if values else Spread(0.0, 0.0)

    def __str__(self) -> str:
        return f"{self.median:.1f} / {self.longest:.1f}"


@dataclass(frozen=True)
class Row:
    """Faults of one kind; in seconds."""

    name: str
    num: int
    whole: Spread
    anywhere: Spread
    rt: Spread
    be: Spread
    num_lost: int


def name_of(fault: Fault) -> str:
    first = fault.episode.strikes[0]
    if fault.episode.kind == "alone":
        return f"{first.role} " + ("killed" if first.stop_s is None else "stopped")
    return LABELS[fault.episode.kind]


def rows_of(faults: Iterable[Fault]) -> list[Row]:
    """Returns the rows for faults from which the system recovered, those with one strike first."""
    by_name: dict[str, list[Fault]] = {}
    for fault in faults:
        if fault.took_s is not None:
            by_name.setdefault(name_of(fault), []).append(fault)
    names = sorted(by_name, key=lambda name: (name in LABELS.values(), name))
    return [_row(name, by_name[name]) for name in names]


def _row(name: str, faults: Sequence[Fault]) -> Row:
    return Row(
        name,
        len(faults),
        Spread.of([fault.took_s for fault in faults if fault.took_s is not None]),
        Spread.of([fault.silence.anywhere_s for fault in faults]),
        Spread.of([fault.silence.rt_s for fault in faults]),
        Spread.of([fault.silence.be_s for fault in faults]),
        sum(fault.num_lost for fault in faults),
    )


def strikes_of(faults: Iterable[Fault]) -> dict[str, Counter[str]]:
    """Returns role -> how often it was killed and stopped, over all episodes."""
    found: dict[str, Counter[str]] = {}
    for fault in faults:
        for strike in fault.episode.strikes:
            what = "killed" if strike.stop_s is None else "stopped"
            found.setdefault(strike.role, Counter())[what] += 1
    return found


def largest(memory: Iterable[Memory]) -> dict[str, int]:
    """Returns role -> bytes of its largest process."""
    found: dict[str, int] = {}
    for each in memory:
        found[each.role] = max(found.get(each.role, 0), each.num_bytes)
    return found


def growth_objections(before: Sequence[Memory], after: Sequence[Memory]) -> list[str]:
    """Checks each process that still exists, and the largest of each role, which may have been restarted."""
    then, now = ({each.pid: each.num_bytes for each in memory} for memory in (before, after))
    pairs = {f"process {pid}": (then[pid], now[pid]) for pid in then.keys() & now.keys()}
    of_then, of_now = largest(before), largest(after)
    pairs |= {role: (of_then[role], of_now[role]) for role in of_then.keys() & of_now.keys()}
    return [
        f"memory of {name} has grown from {was >> 20} to {has >> 20} MiB"
        for name, (was, has) in sorted(pairs.items())
        if has > MAX_GROWTH * was + MAX_GROWN_BYTES
    ]


# ---- pages -----------------------------------------------------------------------------------------------------------


def write(
    directory: Path,
    facts: Mapping[str, Any],
    faults: Sequence[Fault],
    tally: Tally,
    memory: tuple[Sequence[Memory], Sequence[Memory]],
    wrong: Sequence[str],
) -> str:
    """Writes soak.json and soak.md, and returns the page."""
    content = {
        **facts,
        "wrong": list(wrong),
        "tally": tally,
        "strikes": strikes_of(faults),
        "rows": rows_of(faults),
        "memory_bytes": {"before": largest(memory[0]), "after": largest(memory[1])},
        "faults": [asdict(fault) | {"name": name_of(fault), "took_s": fault.took_s} for fault in faults],
    }
    page = "\n\n".join(_page(facts, faults, tally, memory, wrong)) + "\n"
    write_page(directory / "soak", page, content)
    return page


def _page(
    facts: Mapping[str, Any],
    faults: Sequence[Fault],
    tally: Tally,
    memory: tuple[Sequence[Memory], Sequence[Memory]],
    wrong: Sequence[str],
) -> Iterator[str]:
    yield heading("A server while its processes are killed", facts)
    yield f"**Wrong: {len(wrong)}.**"
    yield table(
        ("what", "number"),
        [
            ("streams", tally.num_streams),
            ("batch jobs, and their lines", f"{tally.num_jobs}, {tally.num_lines}"),
            ("tokens", tally.num_tokens),
            ("streams that clients closed early", tally.num_left),
            ("connections that broke with their gateway; clients asked again", tally.num_lost),
            ("calls that were refused while something was down; clients asked again", tally.num_refused),
            ("lines that were given up after four deaths of the gateway", tally.num_given_up),
        ],
    )
    if wrong:
        yield "\n".join(f"- {each}" for each in wrong[:MAX_SHOWN])
    strikes = sorted(strikes_of(faults).items())
    yield table(
        ("role", "killed", "stopped"), [(role, each["killed"], each["stopped"]) for role, each in strikes]
    )
    yield "Seconds, median / longest:"
    yield table(
        (
            "fault",
            "times",
            "whole again",
            "silence everywhere",
            "of an RT stream",
            "of a BE stream",
            "broken connections",
        ),
        [
            (row.name, row.num, row.whole, row.anywhere, row.rt, row.be, row.num_lost)
            for row in rows_of(faults)
        ],
    )
    before, after = map(largest, memory)
    yield "Memory of the largest process, MiB:"
    yield table(
        ("role", "at the start", "at the end"),
        [(role, before[role] >> 20, after[role] >> 20 if role in after else "-") for role in sorted(before)],
    )
