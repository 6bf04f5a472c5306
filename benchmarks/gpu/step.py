"""Measures a whole decode step, from the engine's call to tokens on the host, as a share of the roofline.

A case is a model and a batch of equal prefixes. N x L means N requests that each attend to L tokens in the middle one
of the timed steps. Targets: 80% of the roofline at batch 1, 75% at the others; 65% for a mixture of experts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from alignedserve.engine.build import BuiltEngine
from alignedserve.models.config import ModelConfig
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.ceilings import ceiling
from benchmarks.gpu.decoding import Decoding, engine_for
from benchmarks.gpu.models import config_of, dtype_of, value_bytes
from benchmarks.gpu.profile import busy_seconds, profiled, write_table
from benchmarks.gpu.record import Row
from benchmarks.gpu.roofline import decode_work
from benchmarks.gpu.timing import device_seconds, median_and_spread

BATCHES = {
    "llama-3.1-8b": [(1, 1024), (32, 1024), (128, 512), (256, 512)],
    "opt-13b": [(1, 1024), (32, 1024), (128, 512)],
    "qwen3-30b-a3b": [(1, 1024), (32, 1024), (128, 512), (256, 512)],
    "gemma-3-4b": [(1, 1024), (1, 16384), (32, 1024), (32, 4096)],
}
NUM_PROFILED = 5
AIM_ONE, AIM_MANY, AIM_MIXTURE = 0.80, 0.75, 0.65


def run(bench: Bench) -> None:
    num_steps = bench.pick(50, 4)
    max_steps = 2 * num_steps + NUM_PROFILED + 12
    for model in bench.models(*BATCHES):
        shapes = [(bench.pick(n, min(n, 4)), bench.pick(length, 64)) for n, length in BATCHES[model]]
        if not bench.has_time(model, bench.pick(20, 1)):
            continue
        try:
            batches = [[length] * n for n, length in shapes]
            scheme = bench.options.quantization
            with engine_for(bench, model, batches, max_steps, quantization=scheme) as built:
                for n, length in shapes:
                    name = " ".join(filter(None, (model, scheme, f"{n} x {length}")))
                    bench.case(name, measure, bench, model, built, [length] * n, num_steps)
        except Exception:
            bench.fail(model)


def measure(bench: Bench, model: str, built: BuiltEngine, lengths: Sequence[int], num_steps: int) -> Row:
    first = [length - num_steps // 2 - 3 for length in lengths]
    with Decoding(built.engine, first, 2 * num_steps + NUM_PROFILED + 10) as batch:
        wall = batch.wall_seconds(num_steps)
        between_events = device_seconds(bench, batch.step, num_steps // 2, warm_ups=1)
        activities = profiled(bench, batch.step, NUM_PROFILED)
    named = " ".join(filter(None, (model, bench.options.quantization)))
    row: Row = {"model": named, "batch": len(lengths), "length": max(lengths), **median_and_spread(wall)}
    row |= {"mean_s": statistics.fmean(wall), "events_s": statistics.median(between_events)}
    if activities:
        row["busy_s"] = busy_seconds(activities) / NUM_PROFILED
        write_table(
            bench.out / "kernels.txt", f"{model} {len(lengths)} x {max(lengths)}", activities, NUM_PROFILED
        )
    return row | share(bench, config_of(model, bench), lengths, row["median_s"])


def share(bench: Bench, config: ModelConfig, lengths: Sequence[int], wall_s: float) -> Row:
    dtype = "fp16" if dtype_of(config, bench) == "float16" else "bf16"
    work = decode_work(config, lengths, value_bytes(config, bench), bench.options.quantization)
    roofline_s = work.seconds(ceiling(bench, "copy_bytes_per_s"), ceiling(bench, f"matmul_{dtype}_per_s"))
    aim = AIM_ONE if len(lengths) == 1 else AIM_MANY
    if config.moe:
        aim = AIM_MIXTURE
    return {
        "num_bytes": work.num_bytes,
        "num_flops": work.num_flops,
        "roofline_s": roofline_s,
        "share": roofline_s / wall_s,
        "aim": aim,
        "summary": f"{wall_s * 1e3:8.3f} ms, roofline {roofline_s * 1e3:8.3f} ms: "
        f"{roofline_s / wall_s:6.1%} (aim {aim:.0%})",
    }
