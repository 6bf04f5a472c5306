"""Measures what the host adds to a decode step: the time from call to tokens that is not hidden behind the GPU.

    exposed = duration of a step - time in which the GPU worked on it

The GPU's time is measured as the union of the activities in a profile. Other steps are timed, because the profiler
slows the host down. As a check, events on an empty stream around a step measure it too. A tiny model shows the whole
cost, since its GPU has almost nothing to do. The target is for the 8B: 0.3 ms at batch 256.
"""

from __future__ import annotations

import statistics

from alignedserve.engine.build import BuiltEngine
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.decoding import Decoding, engine_for
from benchmarks.gpu.profile import busy_seconds, profiled, write_table
from benchmarks.gpu.record import Row
from benchmarks.gpu.timing import device_seconds, median_and_spread

AIM_S = 0.3e-3
BATCH, LENGTH = 256, 512
NUM_PROFILED = 10


def exposed_seconds(wall_s: float, busy_s: float | None) -> float:
    """Returns all of it if no GPU activity was seen."""
    return wall_s - (busy_s or 0.0)


def run(bench: Bench) -> None:
    num_steps = bench.pick(100, 4)
    max_steps = 2 * num_steps + NUM_PROFILED + 12
    lengths = [bench.pick(LENGTH, 32)] * bench.pick(BATCH, 8)
    for model in ("opt-125m", *bench.models("llama-3.1-8b")):
        if not bench.has_time(model, bench.pick(10, 1)):
            continue
        try:
            with engine_for(bench, model, [lengths], max_steps) as built:
                name = f"{model} {len(lengths)} x {lengths[0]}"
                bench.case(name, measure, bench, model, built, lengths, num_steps)
        except Exception:
            bench.fail(model)


def measure(bench: Bench, model: str, built: BuiltEngine, lengths: list[int], num_steps: int) -> Row:
    with Decoding(built.engine, lengths, 2 * num_steps + NUM_PROFILED + 10) as batch:
        wall = batch.wall_seconds(num_steps)
        between_events = device_seconds(bench, batch.step, num_steps // 2, warm_ups=1)
        activities = profiled(bench, batch.step, NUM_PROFILED)
    row = median_and_spread(wall) | {"mean_s": statistics.fmean(wall)}
    busy_s = busy_seconds(activities) / NUM_PROFILED if activities else None
    exposed_s = exposed_seconds(row["median_s"], busy_s)
    if activities:
        write_table(bench.out / "kernels.txt", f"host_cost {model}", activities, NUM_PROFILED)
    return {
        "model": model,
        "batch": len(lengths),
        **row,
        "busy_s": busy_s,
        "events_s": statistics.median(between_events),
        "exposed_s": exposed_s,
        "aim_s": AIM_S,
        "summary": f"{row['median_s'] * 1e3:.3f} ms, GPU busy {1e3 * (busy_s or 0):.3f} ms: "
        f"host {exposed_s * 1e3:.3f} ms (aim {AIM_S * 1e3})",
    }
