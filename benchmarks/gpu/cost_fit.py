"""Fits alignedserve/cost.py's model to what `cost_grid` measured: python -m benchmarks.gpu.cost_fit GPU_JSON OUT_DIR

Relative errors are what counts: a point weighs as much as it is short. A fifth of the points is held out of the fit and
tells its error. Balanced attention: the multiset of lengths counts by its sum.

    decodes   max over two lines (fixed_s + token_s * n) + decode_attention_s * sum of lengths
    chunks    prefill_fixed_s + prefill_token_s * c + max(prefill_attention_s * (2bc + c^2), reading all KV)

Both maxima are linear once it is known which side wins: fit, look which wins, fit again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alignedserve.cost import Channel, Channels, CostModel, Line

Points = Sequence[dict[str, Any]]
Numbers = NDArray[np.float64]

HELD_OUT = 5
NUM_ROUNDS = 30
# A fit of iterations says nothing about transfers.
_NO_CHANNEL = Channel(0.0, 1.0)
_NO_CHANNELS = Channels(_NO_CHANNEL, _NO_CHANNEL, _NO_CHANNEL, _NO_CHANNEL)


def fit(points: Points, kv_bytes_per_token: int, source: str) -> CostModel:
    decodes = [point for point in points if not point["chunks"]]
    chunks = [point for point in points if not point["lengths"]]
    lines, attention_s = fit_decodes(decodes)
    return fit_model(lines, attention_s, fit_chunks(chunks, attention_s), kv_bytes_per_token, source)


def fit_model(
    lines: list[Line],
    attention_s: float,
    chunk: tuple[float, float, float],
    kv_bytes_per_token: int,
    source: str,
) -> CostModel:
    fixed_s, token_s, pair_s = chunk
    return CostModel(
        source=source,
        kv_bytes_per_token=kv_bytes_per_token,
        num_kv_tokens=0,
        prefill_fixed_s=fixed_s,
        prefill_token_s=token_s,
        prefill_attention_s=pair_s,
        decode_lines=lines,
        decode_attention_s=attention_s,
        num_filling=1.0,
        channels=_NO_CHANNELS,
    )


def fit_decodes(points: Points) -> tuple[list[Line], float]:
    count = np.array([len(point["lengths"]) for point in points], float)
    total = np.array([sum(point["lengths"]) for point in points], float)
    seconds = _seconds(points)
    best: tuple[float, Numbers] | None = None
    # from wherever the second line may take over
    for crossing in (8, 24, 48, 80, 112, 160, 224):
        found = _fit_two_lines(count, total, seconds, count > crossing)
        error = float(np.median(np.abs(_two_lines(found, count, total) / seconds - 1)))
        if best is None or error < best[0]:
            best = error, found
    assert best is not None
    fixed, token, fixed_too, token_too, attention_s = best[1].tolist()
    return [Line(fixed, token), Line(fixed_too, token_too)], attention_s


def _fit_two_lines(count: Numbers, total: Numbers, seconds: Numbers, is_steep: NDArray[np.bool_]) -> Numbers:
    found = np.zeros(5)
    for _ in range(NUM_ROUNDS):
        flat, steep = ~is_steep * 1.0, is_steep * 1.0
        found = least_squares(np.stack([flat, flat * count, steep, steep * count, total], axis=1), seconds)
        again = found[2] + found[3] * count > found[0] + found[1] * count
        if (again == is_steep).all():
            break
        is_steep = again
    return found


def _two_lines(found: Numbers, count: Numbers, total: Numbers) -> Numbers:
    return np.maximum(found[0] + found[1] * count, found[2] + found[3] * count) + found[4] * total


def fit_chunks(points: Points, attention_s: float) -> tuple[float, float, float]:
    before, count = np.array([point["chunks"][0] for point in points], float).T
    pairs, read_s = 2 * before * count + count**2, attention_s * (before + count)
    seconds, found = _seconds(points), np.zeros(3)
    is_reading = np.zeros(len(points), bool)
    for _ in range(NUM_ROUNDS):
        columns = np.stack([np.ones_like(count), count, np.where(is_reading, 0.0, pairs)], axis=1)
        found = least_squares(columns, seconds, offset=np.where(is_reading, read_s, 0.0))
        again = read_s > found[2] * pairs
        if (again == is_reading).all():
            break
        is_reading = again
    fixed_s, token_s, pair_s = found.tolist()
    return fixed_s, token_s, pair_s


def least_squares(columns: Numbers, seconds: Numbers, offset: Numbers | float = 0.0) -> Numbers:
    """Of relative errors, with no coefficient below zero: the most negative is left out, and the rest fitted again."""
    scaled, target = columns / seconds[:, None], (seconds - offset) / seconds
    # so that microseconds per token and milliseconds are solved for alike
    norms = np.linalg.norm(scaled, axis=0)
    kept = [index for index in range(columns.shape[1]) if norms[index] > 0]
    while kept:
        found = np.linalg.lstsq(scaled[:, kept] / norms[kept], target, rcond=None)[0]
        if found.min() >= 0:
            break
        del kept[int(found.argmin())]
    full = np.zeros(columns.shape[1])
    if kept:
        full[kept] = found / norms[kept]
    return full


def errors(model: CostModel, points: Points) -> dict[str, float]:
    """Relative, of each kind of point: their median and the one that 95 % are below."""
    found: dict[str, float] = {}
    kinds = {
        "decode": [point for point in points if not point["chunks"]],
        "chunk": [point for point in points if not point["lengths"]],
        "both": [point for point in points if point["chunks"] and point["lengths"]],
    }
    for kind, some in kinds.items():
        if some:
            each = [abs(predicted(model, point) / point["seconds"] - 1) for point in some]
            found |= {f"{kind}_median": float(np.median(each)), f"{kind}_p95": float(np.quantile(each, 0.95))}
            found[f"{kind}_points"] = len(some)
    return found


def predicted(model: CostModel, point: dict[str, Any]) -> float:
    return model.iteration([(before, count) for before, count in point["chunks"]], point["lengths"])


def fit_row(row: dict[str, Any], source: str) -> dict[str, Any]:
    points = row["points"]
    held_out = points[::HELD_OUT]
    kept = [point for index, point in enumerate(points) if index % HELD_OUT]
    error = errors(fit(kept, row["kv_bytes_per_token"], source), held_out)
    whole = fit(points, row["kv_bytes_per_token"], source)
    return {
        "source": source,
        "kv_bytes_per_token": row["kv_bytes_per_token"],
        "prefill_fixed_s": whole.prefill_fixed_s,
        "prefill_token_s": whole.prefill_token_s,
        "prefill_attention_s": whole.prefill_attention_s,
        "decode_lines": [{"fixed_s": line.fixed_s, "token_s": line.token_s} for line in whole.decode_lines],
        "decode_attention_s": whole.decode_attention_s,
        "attention": whole.attention,
        "error_on_held_out": error,
        "num_points": len(points),
    }


def _seconds(points: Points) -> Numbers:
    return np.array([point["seconds"] for point in points], float)


def main() -> None:
    measured = json.loads(Path(sys.argv[1]).read_text())
    for row in measured["rows"]:
        if row["part"] == "cost_grid" and row.get("points"):
            source = f"measured on {measured['device']}, {measured['date']}, commit {measured['commit']}"
            found = fit_row(row, source)
            path = Path(sys.argv[2]) / f"cost-{row['model']}.json"
            path.write_text(json.dumps(found, indent=1) + "\n")
            print(path, json.dumps(found["error_on_held_out"]))


if __name__ == "__main__":
    main()
