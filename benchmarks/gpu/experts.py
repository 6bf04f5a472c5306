"""Measures a mixture's experts alone: bytes of hit experts per second, as a share of what a copy reaches on this GPU.

The time runs from a row's logits to the sum of its experts' outputs, as in a layer: route, order, two products, combine
(kernels/triton/experts.py). Rows and their choices are random. Calls follow each other in a CUDA graph. Each uses
another layer's weights, so none finds all of its bytes in the cache. With --quantization experts are quantised;
gpt-oss's are in MXFP4 anyway. Target: 65%.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING

import torch

from alignedserve.kernels.quantised import E2M1, MXFP4, QuantisedWeight
from alignedserve.models.presets import PRESETS
from alignedserve.ops.base import BYTES_PER_WEIGHT
from alignedserve.ops.experts import Expert, ExpertsSpec
from alignedserve.ops.quantise import Part
from benchmarks.gpu.attention import chained_seconds
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.ceilings import ceiling
from benchmarks.gpu.record import Row

if TYPE_CHECKING:
    from alignedserve.kernels.triton.expert_products import ExpertWeights

MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b")
PUBLISHED_IN_MXFP4 = ("gpt-oss-20b",)
ROWS = (1, 8, 32, 128, 256)
TINY_ROWS = (1, 3)
NUM_LAYERS, NUM_TINY_LAYERS = 3, 2
AIM = 0.65
# Rows to compare with the reference, which gathers each row's weights in float64.
NUM_COMPARED = 2
TINY = ExpertsSpec(8, 2, 64, 32, normalises=True)
# Codes, plus a scale of two bytes per 32 codes.
MXFP4_BYTES = 0.5 + 2 / 32


def run(bench: Bench) -> None:
    for model in bench.models(*MODELS):
        if not bench.has_time(model, bench.pick(8, 1)):
            continue
        try:
            layers = Layers(bench, model)
        except Exception:
            bench.fail(model)
            continue
        for rows in TINY_ROWS if bench.options.is_tiny else ROWS:
            bench.case(f"{layers.name} {rows} rows", measure, bench, layers, rows)


def spec_of(model: str) -> ExpertsSpec:
    config, moe = PRESETS[model], PRESETS[model].moe
    if moe is None:
        raise ValueError(f"{model}: is no mixture of experts")
    return ExpertsSpec(moe.num_experts, moe.top_k, config.hidden_size, moe.intermediate_size, moe.normalises)


class Layers:
    """The experts of several layers, with random values."""

    def __init__(self, bench: Bench, model: str) -> None:
        from alignedserve.ops.cuda_experts import stack_experts

        self.spec, self._device = TINY if bench.options.is_tiny else spec_of(model), bench.device
        self._dtype = torch.bfloat16 if bench.is_cuda else torch.float32
        scheme = bench.options.quantization
        self._is_mxfp4 = scheme is None and model in PUBLISHED_IN_MXFP4
        form = MXFP4 if self._is_mxfp4 else scheme
        self.name = " ".join(filter(None, (model, form)))
        each = {None: self._dtype.itemsize, MXFP4: MXFP4_BYTES} | BYTES_PER_WEIGHT
        self.expert_bytes = 3 * self.spec.intermediate_size * self.spec.hidden_size * each[form]
        self.weights = [
            stack_experts(self.spec, self._expert, scheme, self._dtype, bench.device)
            for _ in range(bench.pick(NUM_LAYERS, NUM_TINY_LAYERS))
        ]

    def _expert(self, number: int) -> Expert:
        inner, hidden = self.spec.intermediate_size, self.spec.hidden_size
        return Expert(self._part(inner, hidden), self._part(inner, hidden), self._part(hidden, inner))

    def _part(self, num_out: int, num_in: int) -> Part:
        if not self._is_mxfp4:
            return self.random(num_out, num_in, fan_in=num_in)
        codes = torch.randint(len(E2M1), (num_out, num_in), device=self._device, dtype=torch.uint8)
        scales = torch.randint(-8, -5, (num_out, num_in // 32), device=self._device)
        return QuantisedWeight(MXFP4, codes, torch.exp2(scales).bfloat16(), None, 32)

    def random(self, *size: int, fan_in: int = 1) -> torch.Tensor:
        return torch.empty(size, dtype=self._dtype, device=self._device).normal_(0.0, fan_in**-0.5)


def measure(bench: Bench, layers: Layers, rows: int) -> Row:
    from alignedserve.kernels.triton.expert_route import route_rows
    from alignedserve.kernels.triton.experts import mix_experts, mix_experts_torch

    spec = layers.spec
    x, residual = layers.random(rows, spec.hidden_size), layers.random(rows, spec.hidden_size)
    logits, out = [layers.random(rows, spec.num_experts) for _ in layers.weights], torch.empty_like(x)
    calls = [
        partial(
            mix_experts, x, each, weights.gate_up, weights.down, spec.top_k, spec.normalises, residual, out
        )
        for each, weights in zip(logits, layers.weights, strict=True)
    ]
    num_hit = [int((route_rows(each, spec.top_k, spec.normalises).counts > 0).sum()) for each in logits]
    seconds = statistics.median(chained_seconds(bench, calls))
    num_bytes = statistics.fmean(num_hit) * layers.expert_bytes
    share = num_bytes / seconds / ceiling(bench, "copy_bytes_per_s")
    calls[0]()
    some = slice(0, NUM_COMPARED)
    first = layers.weights[0]
    gate_up, down = (values_of(each, spec.num_experts, x) for each in (first.gate_up, first.down))
    expected = mix_experts_torch(
        x[some], logits[0][some], gate_up, down, spec.top_k, spec.normalises, residual[some]
    )
    error = float((out[some].double() - expected.double()).norm() / expected.double().norm())
    return {
        "model": layers.name,
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


def values_of(weights: ExpertWeights, num_experts: int, like: torch.Tensor) -> torch.Tensor:
    """[expert, out, in]"""
    from alignedserve.kernels.triton.coded_weight import dequantise

    if isinstance(weights, torch.Tensor):
        return weights
    return dequantise(weights, like.new_empty(weights.shape)).view(num_experts, -1, weights.num_in)
