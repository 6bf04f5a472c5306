"""Ends normally, and records which parts the record at --look has."""

from __future__ import annotations

import json

from tests.benchmarks.parts.record import options, write

if __name__ == "__main__":
    args = options()
    is_there = args.look is not None and args.look.exists()
    before = [part["part"] for part in json.loads(args.look.read_text())["parts"]] if is_there else []
    write(args.out, {"part": "ends", "case": "a", "took_s": 1.5, "before": before, "summary": "as it should"})
