"""Limits of measures, which only fall: tests/house.toml and tests/lines.toml, one line each.

    "files to the first token" = { limit = 122, lowest = 122 }

`lowest` is the lowest limit so far. A higher limit names the decision record that says what it is for (`adr = 70`).
`python -m benchmarks.house --lower` writes lower limits; a person raises one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.house.source import ROOT

MEASURES, LINES = ROOT / "tests/house.toml", ROOT / "tests/lines.toml"
# A new limit is the value and this share of it, rounded down: a few lines more need no decision.
_ROOM = 0.002
# A value this far below its limit, as a share, lowers it.
_MAX_SLACK = 0.02
_ENTRY = re.compile(r'^"?(?P<name>[^"=]+?)"? = \{.*\}', re.MULTILINE)


@dataclass(frozen=True)
class Limit:
    limit: int
    lowest: int
    # the number of the decision record, if the limit is above the lowest
    adr: int | None = None

    def lowered(self, value: int) -> Limit:
        """Returns the limit for this value, or the same one if that would be higher."""
        limit = min(self.limit, int(value * (1 + _ROOM)))
        return Limit(limit, min(self.lowest, limit), self.adr if limit > self.lowest else None)

    def __str__(self) -> str:
        adr = "" if self.adr is None else f", adr = {self.adr}"
        return f"{{ limit = {self.limit:_}, lowest = {self.lowest:_}{adr} }}"


def read(path: Path) -> dict[str, Limit]:
    (limits,) = tomllib.loads(path.read_text()).values()
    return {name: Limit(**entry) for name, entry in limits.items()}


def lower(path: Path, values: Mapping[str, int]) -> None:
    limits = read(path)

    def lowered(entry: re.Match[str]) -> str:
        name = entry["name"]
        limit = limits[name].lowered(values[name]) if name in values else limits[name]
        return f'"{name}" = {limit}'

    path.write_text(_ENTRY.sub(lowered, path.read_text()))


def faults(values: Mapping[str, int], limits: Mapping[str, Limit], root: Path = ROOT) -> Iterator[str]:
    """Yields what is wrong, as a sentence that says what to do."""
    for name in sorted(values.keys() - limits.keys()):
        yield f"{name}: it is {values[name]:,} and has no limit"
    for name in sorted(limits.keys() - values.keys()):
        yield f"{name}: it has a limit, and nothing measures it"
    for name in sorted(values.keys() & limits.keys()):
        yield from _faults_of(name, values[name], limits[name], root)


def _faults_of(name: str, value: int, limit: Limit, root: Path) -> Iterator[str]:
    if value > limit.limit:
        yield (
            f"{name}: it is {value:,}, above its limit of {limit.limit:,}. Lower it, or raise the limit with an ADR "
            "that says what for, and name that (adr = 70)"
        )
    if value < limit.limit * (1 - _MAX_SLACK):
        yield (
            f"{name}: it is {value:,}, far below its limit of {limit.limit:,}. `python -m benchmarks.house --lower` "
            "lowers the limit"
        )
    if limit.limit > limit.lowest and (
        limit.adr is None or not list(root.glob(f"docs/adr/{limit.adr:04}-*.md"))
    ):
        yield (
            f"{name}: its limit of {limit.limit:,} was raised from {limit.lowest:,}, and no ADR is named beside it "
            "(adr = 70)"
        )
