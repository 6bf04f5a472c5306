"""Traces with one JSON object per line, in one of two formats:

with classes: `{"arrival_s": 1.5, "prompt_len": 300, "output_len": 40, "tier": "be"}`
as Mooncake's: `{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}`
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from alignedserve.sim.trace import (
    MOONCAKE_FIELDS,
    MUST_HOLD,
    OWN_FIELDS,
    Arrival,
    Lengths,
    quoted,
    read_azure_trace,
)

_Tokens = Annotated[int, msgspec.Meta(ge=1)]


class _OwnLine(msgspec.Struct, forbid_unknown_fields=True):
    arrival_s: float
    prompt_len: _Tokens
    output_len: _Tokens
    tier: Literal["rt", "be"] = "rt"
    # Seconds after its arrival until a best-effort request is due.
    window_s: Annotated[float, msgspec.Meta(gt=0)] | None = None

    @property
    def arrival(self) -> Arrival:
        lengths = Lengths(self.prompt_len, self.output_len)
        return Arrival(self.arrival_s, lengths, self.tier, self.window_s)


class _MooncakeLine(msgspec.Struct, forbid_unknown_fields=True):
    """github.com/kvcache-ai/Mooncake, "FAST25-release/traces"."""

    # In milliseconds.
    timestamp: float
    input_length: _Tokens
    output_length: _Tokens
    # See `Arrival.hash_ids`.
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()

    @property
    def arrival(self) -> Arrival:
        lengths = Lengths(self.input_length, self.output_length)
        return Arrival(self.timestamp / 1000, lengths, hash_ids=self.hash_ids)


_Kind = type[_OwnLine] | type[_MooncakeLine]


def read_trace(path: Path) -> list[Arrival]:
    """Reads a trace of any format. Returns its requests in order of time, with the first at 0."""
    if not path.is_file():
        raise ValueError(f"trace={str(path)!r}: there is no such file")
    try:
        return _read_jsonl(path) if path.suffix == ".jsonl" else read_azure_trace(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not text: {error}") from None


def _read_jsonl(path: Path) -> list[Arrival]:
    lines = [
        (line, f"{path}, line {number}")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.strip()
    ]
    if not lines:
        raise ValueError(f"{path}: holds no requests")
    kind = _kind_of(*lines[0])
    arrivals = [_read_line(line, where, kind) for line, where in lines]
    start_s = min(each.time_s for each in arrivals)
    moved = [replace(each, time_s=each.time_s - start_s) for each in arrivals]
    return sorted(moved, key=lambda arrival: arrival.time_s)


def _kind_of(line: str, where: str) -> _Kind:
    """Returns the format of the line. Raises ValueError if its fields match no format."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw]).keys()
    except msgspec.DecodeError as error:
        raise ValueError(f"{where}: {error}") from None
    if fields >= {*OWN_FIELDS}:
        return _OwnLine
    if fields >= {*MOONCAKE_FIELDS}:
        return _MooncakeLine
    raise ValueError(f"{where}: has {quoted(fields) or 'no fields'}: {MUST_HOLD}")


def _read_line(line: str, where: str, kind: _Kind) -> Arrival:
    try:
        return msgspec.json.decode(line, type=kind).arrival
    except msgspec.DecodeError as error:
        # Raises an error that names all fields, if some are missing.
        _kind_of(line, where)
        raise ValueError(f"{where}: {error}") from None
