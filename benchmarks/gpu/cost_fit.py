"""Fits the model in timing/cost.py to the results of `cost_grid`: python -m benchmarks.gpu.cost_fit GPU_JSON OUT_DIR

The fit is the one in `alignedserve profile` (alignedserve/instance/profile/fit.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from alignedserve.instance.profile.fit import Error, fit_held_out
from alignedserve.instance.profile.points import Measured, Point
from benchmarks.harness import parser_of, write_json

# Not fields of a fit, which can't determine them.
_NOT_MEASURED = ("num_kv_tokens", "num_filling", "channels")


def fit_row(row: dict[str, Any], source: str) -> dict[str, Any]:
    measured = [measured_of(point) for point in row["points"]]
    cost, errors = fit_held_out(measured, row["kv_bytes_per_token"], num_kv_tokens=0, source=source)
    numbers = {name: value for name, value in msgspec.to_builtins(cost).items() if name not in _NOT_MEASURED}
    return numbers | {"error_on_held_out": _flat(errors), "num_points": len(measured)}


def measured_of(point: dict[str, Any]) -> Measured:
    chunks = tuple((before, count) for before, count in point["chunks"])
    return Measured(Point(chunks, tuple(point["lengths"])), point["seconds"])


def _flat(errors: dict[str, Error]) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind, error in errors.items():
        found |= {
            f"{kind}_median": error.median,
            f"{kind}_p95": error.p95,
            f"{kind}_points": error.num_points,
        }
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("measured", type=Path, metavar="GPU_JSON")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    args = parser.parse_args()
    measured = json.loads(args.measured.read_text())
    for row in measured["rows"]:
        if row["part"] == "cost_grid" and row.get("points"):
            source = f"measured on {measured['device']}, {measured['date']}, commit {measured['commit']}"
            found = fit_row(row, source)
            path = args.out / f"cost-{row['model']}.json"
            write_json(path, found)
            print(path, json.dumps(found["error_on_held_out"]))


if __name__ == "__main__":
    main()
