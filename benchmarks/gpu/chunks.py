"""Measures steps that compute a prompt chunk, from the call to the token on the host, as a share of the roofline.

Targets for Llama-3.1-8B: 128, 512 and 1,024 tokens in 6, 14 and 27 ms.
"""

from __future__ import annotations

import statistics

from alignedserve.engine.engine import Engine
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.ceilings import ceiling
from benchmarks.gpu.cost_grid import MAX_STEPS, Point, point_seconds
from benchmarks.gpu.decoding import engine_for
from benchmarks.gpu.models import config_of, dtype_of, value_bytes
from benchmarks.gpu.record import Row
from benchmarks.gpu.roofline import chunk_work

MODELS = ("llama-3.1-8b", "gemma-3-4b")
CHUNKS = ((0, 128), (0, 512), (0, 1024), (0, 2048), (4096, 512))
TINY_CHUNKS = ((0, 16), (64, 16))
AIMS_MS = {("llama-3.1-8b", 0, 128): 6.0, ("llama-3.1-8b", 0, 512): 14.0, ("llama-3.1-8b", 0, 1024): 27.0}


def run(bench: Bench) -> None:
    chunks = TINY_CHUNKS if bench.options.is_tiny else CHUNKS
    for model in bench.models(*MODELS):
        if not bench.has_time(model, bench.pick(10, 1)):
            continue
        try:
            batches = [[before + count] for before, count in chunks]
            with engine_for(
                bench, model, batches, MAX_STEPS, quantization=bench.options.quantization
            ) as built:
                for before, count in chunks:
                    name = f"{model} {count} tokens" + (f" after {before}" if before else "")
                    bench.case(name, measure, bench, model, built.engine, before, count)
        except Exception:
            bench.fail(model)


def measure(bench: Bench, model: str, engine: Engine, before: int, count: int) -> Row:
    seconds = point_seconds(engine, Point(((before, count),), ()))
    config = config_of(model, bench)
    dtype = "fp16" if dtype_of(config, bench) == "float16" else "bf16"
    work = chunk_work(config, before, count, value_bytes(config, bench), bench.options.quantization)
    floor_s = work.seconds(ceiling(bench, "copy_bytes_per_s"), ceiling(bench, f"matmul_{dtype}_per_s"))
    wall_s = statistics.median(seconds)
    aim_ms = AIMS_MS.get((model, before, count))
    aim = f" (aim {aim_ms:g} ms)" if aim_ms else ""
    return {
        "model": model,
        "before": before,
        "count": count,
        "median_s": wall_s,
        "roofline_s": floor_s,
        "share": floor_s / wall_s,
        "aim_ms": aim_ms,
        "summary": f"{wall_s * 1e3:8.3f} ms, roofline {floor_s * 1e3:8.3f} ms: {floor_s / wall_s:6.1%}{aim}",
    }
