"""Measures seconds of work on a device with its events, or on a CPU with the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from benchmarks.gpu.bench import Bench


def device_seconds(
    bench: Bench, work: Callable[[], Any], repeats: int, warm_ups: int = 3, stream: Any = None
) -> list[float]:
    """Returns the seconds of each of `repeats` queued calls: the time between an event before it and one after it."""
    for _ in range(warm_ups):
        work()
    bench.synchronize()
    if not bench.is_cuda:
        return [host_seconds(work) for _ in range(repeats)]
    marks = [_event() for _ in range(repeats + 1)]
    marks[0].record(stream)
    for mark in marks[1:]:
        work()
        mark.record(stream)
    bench.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]


def host_seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def median_and_spread(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "repeats": len(seconds),
    }


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
