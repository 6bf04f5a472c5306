"""A mixture's experts alone: bytes of those that a batch hits over time, as a share of what a copy reaches on this GPU.

From a row's logits to the sum of what its experts make of it, as in a layer: route, order, two products, combine
(kernels/triton/experts.py). Rows are random and choose at random. Calls follow each other in a CUDA graph, each over
another layer's weights, so that none finds all of its bytes in the cache. Aim: 65 %.
"""

from __future__ import annotations

import statistics
from functools import partial

import torch

from alignedserve.models.presets import PRESETS
from alignedserve.ops.experts import ExpertsSpec
from benchmarks.gpu.attention import chained_seconds
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.ceilings import ceiling
from benchmarks.gpu.record import Row

MODELS = ("qwen3-30b-a3b", "mixtral-8x7b")
ROWS = (1, 8, 32, 128, 256)
NUM_LAYERS = 3
AIM = 0.65
# Rows that are compared with the reference, which gathers the weights of each in float64.
NUM_COMPARED = 2
TINY = ExpertsSpec(8, 2, 64, 48, normalises=True)


def run(bench: Bench) -> None:
    for model in bench.models(*MODELS):
        if not bench.has_time(model, bench.pick(8, 1)):
            continue
        try:
            layers = Layers(bench, TINY if bench.options.is_tiny else spec_of(model))
        except Exception:
            bench.fail(model)
            continue
        for rows in ROWS:
            rows = bench.pick(rows, min(rows, 3))
            bench.case(f"{model} {rows} rows", measure, bench, model, layers, rows)


def spec_of(model: str) -> ExpertsSpec:
    config, moe = PRESETS[model], PRESETS[model].moe
    if moe is None:
        raise ValueError(f"{model}: is no mixture of experts")
    return ExpertsSpec(moe.num_experts, moe.top_k, config.hidden_size, moe.intermediate_size, moe.normalises)


class Layers:
    """The experts of several layers, of random values."""

    def __init__(self, bench: Bench, spec: ExpertsSpec) -> None:
        self.spec, self._device = spec, bench.device
        self._dtype = torch.bfloat16 if bench.is_cuda else torch.float32
        num, inner, hidden = spec.num_experts, spec.intermediate_size, spec.hidden_size
        self.weights = [
            (
                self.random(num, 2 * inner, hidden, fan_in=hidden),
                self.random(num, hidden, inner, fan_in=inner),
            )
            for _ in range(NUM_LAYERS)
        ]

    def random(self, *size: int, fan_in: int = 1) -> torch.Tensor:
        return torch.empty(size, dtype=self._dtype, device=self._device).normal_(0.0, fan_in**-0.5)

    @property
    def expert_bytes(self) -> int:
        return 3 * self.spec.intermediate_size * self.spec.hidden_size * self._dtype.itemsize


def measure(bench: Bench, model: str, layers: Layers, rows: int) -> Row:
    from alignedserve.kernels.triton.expert_route import route_rows
    from alignedserve.kernels.triton.experts import mix_experts, mix_experts_torch

    spec = layers.spec
    x, residual = layers.random(rows, spec.hidden_size), layers.random(rows, spec.hidden_size)
    logits, out = [layers.random(rows, spec.num_experts) for _ in layers.weights], torch.empty_like(x)
    calls = [
        partial(mix_experts, x, each, *weights, spec.top_k, spec.normalises, residual, out)
        for each, weights in zip(logits, layers.weights, strict=True)
    ]
    num_hit = [int((route_rows(each, spec.top_k, spec.normalises).counts > 0).sum()) for each in logits]
    seconds = statistics.median(chained_seconds(bench, calls))
    num_bytes = statistics.fmean(num_hit) * layers.expert_bytes
    share = num_bytes / seconds / ceiling(bench, "copy_bytes_per_s")
    calls[0]()
    some = slice(0, NUM_COMPARED)
    expected = mix_experts_torch(
        x[some], logits[0][some], *layers.weights[0], spec.top_k, spec.normalises, residual[some]
    )
    error = float((out[some].double() - expected.double()).norm() / expected.double().norm())
    return {
        "model": model,
        "rows": rows,
        "num_hit": num_hit,
        "num_bytes": num_bytes,
        "median_s": seconds,
        "share": share,
        "aim": AIM,
        "error": error,
        "summary": f"{seconds * 1e6:8.1f} us, {statistics.fmean(num_hit):.0f} experts: {share:6.1%} (aim {AIM:.0%}), "
        f"error {error:.1e}",
    }
