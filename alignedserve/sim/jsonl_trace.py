"""Traces with classes, an object a line: `{"arrival_s": 1.5, "prompt_len": 300, "output_len": 40, "tier": "be"}`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from alignedserve.sim.trace import Arrival, Lengths, read_azure_trace

_Tokens = Annotated[int, msgspec.Meta(ge=1)]


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    arrival_s: float
    prompt_len: _Tokens
    output_len: _Tokens
    tier: Literal["rt", "be"] = "rt"
    # Seconds after its arrival until a best-effort request is due.
    window_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


def read_trace(path: Path) -> list[Arrival]:
    """Of either kind, in order of time, from 0 on."""
    if not path.is_file():
        raise ValueError(f"trace={str(path)!r}: there is no such file")
    try:
        return _read_jsonl(path) if path.suffix == ".jsonl" else read_azure_trace(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no text: {error}") from None


def _read_jsonl(path: Path) -> list[Arrival]:
    lines = enumerate(path.read_text().splitlines(), 1)
    read = [_read_line(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    if not read:
        raise ValueError(f"{path}: holds no requests")
    start_s = min(each.arrival_s for each in read)
    arrivals = [
        Arrival(each.arrival_s - start_s, Lengths(each.prompt_len, each.output_len), each.tier, each.window_s)
        for each in read
    ]
    return sorted(arrivals, key=lambda arrival: arrival.time_s)


def _read_line(line: str, where: str) -> _Line:
    try:
        return msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise ValueError(f"{where}: {error}") from None
