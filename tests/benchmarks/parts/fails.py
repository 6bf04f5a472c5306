"""Measures one case, then fails."""

from __future__ import annotations

from tests.benchmarks.parts.record import options, write

if __name__ == "__main__":
    write(options().out, {"part": "fails", "case": "a", "summary": "as it should"})
    raise RuntimeError("out of luck")
