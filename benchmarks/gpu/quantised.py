"""Measures linear layers with weights in 8 and 4 bits alone.

The results are bytes per second, as a share of what a copy reaches on this GPU, and the speedup over bfloat16.

These are layers of Llama-3.1-8B, computed as a step with that number of rows would (alignedserve/ops/cuda_linear.py).
"in pieces" computes few rows in the way meant for many, to find the right MAX_CODED_ROWS. Weights are random. Calls
follow each other in a CUDA graph. Each uses another layer's weights, so none finds all of its bytes in the cache.
Target: 65% with few rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from alignedserve.kernels.quantised import FP8, FP8_DTYPE, INT4, INT8, QuantisedWeight
from alignedserve.ops.torch_ops import TorchLinear
from benchmarks.gpu.attention import chained_seconds
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.ceilings import ceiling
from benchmarks.gpu.record import Row

# Inputs and outputs.
LAYERS = {"qkv": (4096, 6144), "gate_up": (4096, 28672), "down": (14336, 4096)}
TINY = {"down": (96, 64)}
ROWS = (1, 2, 8, 32, 64, 128, 512, 2048)
TINY_ROWS = (1, 3, 70)
# These numbers of rows are measured both ways.
FEW = range(2, 65)
# Bytes of all layers together: several times the size of the cache.
MIN_BYTES = 300 << 20
MAX_LAYERS = 24
AIM = 0.65
NUM_COMPARED = 4


@dataclass(frozen=True)
class Format:
    kind: str
    # None: one scale per output.
    group: int | None = None
    has_zeros: bool = False


FORMATS = {
    "int8": Format(INT8),
    "int4": Format(INT4, 32),
    "awq": Format(INT4, 128, has_zeros=True),
    "fp8": Format(FP8),
    "fp8 blocks": Format(FP8, 128),
}


def run(bench: Bench) -> None:
    for layer, (num_in, num_out) in (TINY if bench.options.is_tiny else LAYERS).items():
        plain_s: dict[int, float] = {}
        for name, form in {"bf16": None, **FORMATS}.items():
            if not bench.has_time(f"{layer} {name}", bench.pick(8, 1)):
                return
            try:
                layers = Layers(bench, form, num_in, num_out)
            except Exception:
                bench.fail(f"{layer} {name}")
                continue
            for rows in TINY_ROWS if bench.options.is_tiny else ROWS:
                case = f"{layer} {name} {rows} rows"
                row = bench.case(case, measure, bench, layers, rows, layers.linear, plain_s.get(rows))
                if form is None and row is not None:
                    plain_s[rows] = row["median_s"]
                if form is not None and rows in FEW:
                    bench.case(
                        f"{case} in pieces", measure, bench, layers, rows, layers.in_pieces, plain_s.get(rows)
                    )


class Layers:
    """The weights of several identical layers."""

    def __init__(self, bench: Bench, form: Format | None, num_in: int, num_out: int) -> None:
        from alignedserve.ops.cuda_ops import CudaOps

        # Triton's interpreter can't multiply bfloat16 matrices.
        self.dtype = torch.bfloat16 if bench.is_cuda else torch.float16
        self._ops = CudaOps(self.dtype, bench.device)
        self.device, self.num_in, self.num_out = bench.device, num_in, num_out
        first = self._random(form)
        values = first if isinstance(first, torch.Tensor) else first.dequantised()
        self.first_values = values.to(self.dtype)
        self.num_bytes = values.numel() * 2 if isinstance(first, torch.Tensor) else first.num_bytes
        count = bench.pick(max(2, min(MAX_LAYERS, -(-MIN_BYTES // self.num_bytes))), 2)
        self.weights = [
            self._ops.linear_weight([first if number == 0 else self._random(form)]) for number in range(count)
        ]

    def _random(self, form: Format | None) -> torch.Tensor | QuantisedWeight:
        shape = self.num_out, self.num_in
        if form is None:
            return torch.randn(shape, device=self.device).mul_(self.num_in**-0.5)
        group = min(form.group or self.num_in, self.num_in)
        groups = self.num_out, -(-self.num_in // group)
        scales = torch.rand(groups, device=self.device).add_(0.5).mul_(self.num_in**-0.5)
        if form.kind == FP8:
            codes = torch.randn(shape, device=self.device).to(FP8_DTYPE)
            return QuantisedWeight(FP8, codes, scales, None, group)
        most = 16 if form.kind == INT4 else 256
        made = partial(torch.randint, most, device=self.device, dtype=torch.uint8)
        zeros = made(groups) if form.has_zeros else None
        return QuantisedWeight(form.kind, made(shape), scales.div_(most // 4), zeros, group)

    def x(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, self.num_in, device=self.device).to(self.dtype)

    def linear(self, x: torch.Tensor, weight: TorchLinear) -> torch.Tensor:
        return self._ops.linear(x, weight)

    @staticmethod
    def in_pieces(x: torch.Tensor, weight: Any) -> torch.Tensor:
        from alignedserve.ops.cuda_linear import linear_in_pieces

        return linear_in_pieces(x, weight.coded, None)


def measure(
    bench: Bench,
    layers: Layers,
    rows: int,
    linear: Callable[[torch.Tensor, Any], torch.Tensor],
    plain_s: float | None,
) -> Row:
    x = layers.x(rows)
    calls = [partial(linear, x, weight) for weight in layers.weights]
    seconds = statistics.median(chained_seconds(bench, calls))
    share = layers.num_bytes / seconds / ceiling(bench, "copy_bytes_per_s")
    some = x[:NUM_COMPARED]
    expected = some.double() @ layers.first_values.double().T
    error = float((calls[0]()[:NUM_COMPARED].double() - expected).norm() / expected.norm())
    faster = plain_s / seconds if plain_s else 1.0
    return {
        "rows": rows,
        "num_bytes": layers.num_bytes,
        "median_s": seconds,
        "share": share,
        "faster": faster,
        "aim": AIM,
        "error": error,
        "summary": f"{seconds * 1e6:8.1f} us: {share:6.1%} (aim {AIM:.0%}), {faster:.2f} x bf16, error {error:.1e}",
    }
