"""A GPU's activities, kernel by kernel, from the trace of torch's profiler."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import Bench

# Categories of trace events on the device.
CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}


@dataclass(frozen=True)
class Activity:
    name: str
    start_s: float
    end_s: float


def profiled(bench: Bench, work: Callable[[], Any], repeats: int) -> list[Activity]:
    """Returns all activities of `repeats` calls, in order of time. Returns nothing on a CPU."""
    if not bench.is_cuda:
        return []
    bench.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            work()
        bench.synchronize()
    path = bench.out / "trace.json"
    profiler.export_chrome_trace(str(path))
    activities = activities_of(json.loads(path.read_text()))
    path.unlink()
    return activities


def activities_of(trace: dict[str, Any]) -> list[Activity]:
    found = [
        Activity(event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in CATEGORIES
    ]
    return sorted(found, key=lambda activity: activity.start_s)


def busy_seconds(activities: Sequence[Activity]) -> float:
    """Returns the time in which at least one activity was running. They must be in the order of their starts."""
    busy_s, through_s = 0.0, float("-inf")
    for activity in activities:
        busy_s += max(0.0, activity.end_s - max(activity.start_s, through_s))
        through_s = max(through_s, activity.end_s)
    return busy_s


def table(activities: Sequence[Activity], repeats: int, num_rows: int = 40) -> str:
    """Returns the names that took longest, per call."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for activity in activities:
        seconds[activity.name].append(activity.end_s - activity.start_s)
    total_s = sum(map(sum, seconds.values()))
    lines = [f"{'ms':>9} {'share':>6} {'calls':>6}  per step; {total_s / repeats * 1e3:.3f} ms in all"]
    for name, each in sorted(seconds.items(), key=lambda item: -sum(item[1]))[:num_rows]:
        lines.append(
            f"{sum(each) / repeats * 1e3:9.4f} {sum(each) / total_s:6.1%} {len(each) / repeats:6.1f}  {name[:160]}"
        )
    return "\n".join(lines)


def write_table(path: Path, title: str, activities: Sequence[Activity], repeats: int) -> None:
    """Appends to the file."""
    with path.open("a") as file:
        file.write(f"== {title}\n{table(activities, repeats)}\n\n")
