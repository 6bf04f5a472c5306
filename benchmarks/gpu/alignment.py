"""Measures when and how much decode batches of similar prefix lengths help: AlignedServe's figures 1 and 3.

Mixes: a step of 64 requests, all 128 tokens long, or with 1, 2 or 4 of them as long as the model allows (at most 4096).
Groups: one set of heavy-tailed lengths, cut into batches by length (aligned: each batch is one quantile) and at random
(mixed), so the steps of both add up to the same requests. Each is measured with the plain kernel (one program per
sequence and KV head) and the balanced one (split-KV), for models with many KV heads and with few.

A step's attention time is its time minus that of a batch with as many requests of one block each.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from alignedserve.engine.engine import Engine
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.decoding import BLOCK_SIZE, Decoding, engine_for, has_decode_kernels
from benchmarks.gpu.models import config_of
from benchmarks.gpu.record import Row

MODELS = ("llama-3.1-8b", "llama-2-7b", "opt-6.7b")
BATCHES = (64, 16, 128, 32)
NUM_GROUPS = 8
SHORT, LONGEST = 128, 4096
# The median of the heavy-tailed lengths, and the standard deviation of their logarithm.
MEDIAN, SIGMA = 256, 1.0
NUM_STEPS, WARM_UPS = 6, 2


def heavy_tailed(count: int, longest: int, seed: int = 0) -> list[int]:
    choose = random.Random(seed)
    return [
        min(max(BLOCK_SIZE, round(MEDIAN * choose.lognormvariate(0, SIGMA))), longest) for _ in range(count)
    ]


def aligned_groups(lengths: Sequence[int], num_groups: int) -> list[list[int]]:
    """Returns the quantiles, the shortest first."""
    size = len(lengths) // num_groups
    ordered = sorted(lengths)
    return [ordered[first : first + size] for first in range(0, size * num_groups, size)]


def mixed_groups(lengths: Sequence[int], num_groups: int, seed: int = 1) -> list[list[int]]:
    size = len(lengths) // num_groups
    shuffled = list(lengths)
    random.Random(seed).shuffle(shuffled)
    return [shuffled[first : first + size] for first in range(0, size * num_groups, size)]


def mixes(batch: int, longest: int) -> dict[int, list[int]]:
    """Returns the lengths by the number of long requests."""
    return {num: [longest] * num + [SHORT] * (batch - num) for num in (0, 1, 2, 4)}


def run(bench: Bench) -> None:
    kernels = bench.options.decode_kernels if has_decode_kernels() else ("only",)
    for model in bench.models(*MODELS):
        for kernel in kernels:
            if bench.has_time(f"{model} {kernel}", bench.pick(20, 1)):
                _cells(bench, model, kernel)


def _cells(bench: Bench, model: str, kernel: str) -> None:
    max_steps = NUM_STEPS + WARM_UPS + 1
    longest = min(config_of(model, bench).max_position, bench.pick(LONGEST, 256)) - max_steps
    batches = [bench.pick(batch, batch // 16) for batch in BATCHES]
    split = {
        batch: {"aligned": aligned_groups(lengths, NUM_GROUPS), "mixed": mixed_groups(lengths, NUM_GROUPS)}
        for batch in batches
        for lengths in [heavy_tailed(batch * NUM_GROUPS, longest)]
    }
    wanted = list(mixes(batches[0], longest).values())
    wanted += [group for kinds in split.values() for groups in kinds.values() for group in groups]
    try:
        with engine_for(bench, model, wanted, max_steps, kernel) as built:
            name = f"{model} {kernel}"
            bench.case(f"{name} long ones", _mixes, built.engine, model, kernel, batches[0], longest)
            for batch, kinds in split.items():
                bench.case(f"{name} groups of {batch}", _groups, built.engine, model, kernel, kinds)
    except Exception:
        bench.fail(f"{model} {kernel}")


def _mixes(engine: Engine, model: str, kernel: str, batch: int, longest: int) -> Row:
    base_s = step_seconds(engine, [BLOCK_SIZE] * batch)
    seconds = {num: step_seconds(engine, lengths) for num, lengths in mixes(batch, longest).items()}
    text = ", ".join(f"{num}: {each * 1e3:.2f}" for num, each in seconds.items())
    return {
        "model": model,
        "kernel": kernel,
        "batch": batch,
        "short": SHORT,
        "long": longest,
        "base_s": base_s,
        "step_s": {str(num): each for num, each in seconds.items()},
        "attention_s": {str(num): each - base_s for num, each in seconds.items()},
        "steps": NUM_STEPS,
        "summary": f"ms a step, by how many are {longest} long: {text}",
    }


def _groups(engine: Engine, model: str, kernel: str, kinds: dict[str, list[list[int]]]) -> Row:
    batch = len(kinds["mixed"][0])
    base_s = step_seconds(engine, [BLOCK_SIZE] * batch)
    seconds = {kind: [step_seconds(engine, group) for group in groups] for kind, groups in kinds.items()}
    gain = sum(seconds["mixed"]) / sum(seconds["aligned"])
    each = {kind: statistics.fmean(found) * 1e3 for kind, found in seconds.items()}
    return {
        "model": model,
        "kernel": kernel,
        "batch": batch,
        "base_s": base_s,
        "step_s": seconds,
        "sums": {kind: list(map(sum, groups)) for kind, groups in kinds.items()},
        "longest": {kind: list(map(max, groups)) for kind, groups in kinds.items()},
        "gain": gain,
        "steps": NUM_STEPS,
        "summary": f"mixed {each['mixed']:.2f} ms, aligned {each['aligned']:.2f}: {gain:.3f} times",
    }


def step_seconds(engine: Engine, lengths: Sequence[int]) -> float:
    with Decoding(engine, lengths, NUM_STEPS + WARM_UPS + 1) as batch:
        return statistics.median(batch.wall_seconds(NUM_STEPS, WARM_UPS))
