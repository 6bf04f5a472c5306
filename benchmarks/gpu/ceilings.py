"""Measures this GPU's limits. The other parts report their results as shares of these.

    copy_bytes_per_s      a device-to-device copy, bytes read plus bytes written
    read_bytes_per_s      a sum, bytes read (a hint of what a kernel that only reads could reach)
    matmul_DTYPE_per_s    FLOPs of an 8192 x 8192 x 8192 product
    narrow_DTYPE_per_s    FLOPs of 256 rows through a layer of 4096 x 28672, as in a decode step (a hint)
    h2d, d2h_bytes_per_s  one large copy between pinned host memory and the device

All use random data, because zeros multiply faster.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.record import Row
from benchmarks.gpu.timing import device_seconds, median_and_spread

GIB = 1 << 30
MIB = 1 << 20
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def matmul_flops(m: int, k: int, n: int) -> int:
    return 2 * m * k * n


def run(bench: Bench) -> None:
    for name in _measures(bench):
        _ceiling(bench, name)


def ceiling(bench: Bench, name: str) -> float:
    """Returns the value measured by `run`, or measures it now."""
    if name not in bench.ceilings:
        _ceiling(bench, name)
    return bench.ceilings[name]


def _ceiling(bench: Bench, name: str) -> None:
    measure, *arguments = _measures(bench)[name]
    row = bench.case(name, measure, bench, *arguments)
    if row is not None:
        bench.ceilings[name] = row["per_s"]


def _measures(bench: Bench) -> dict[str, tuple[Any, ...]]:
    """Returns a function and its arguments beside the bench by name, the most important first."""
    size, width, inner = bench.pick(8192, 128), bench.pick(4096, 128), bench.pick(28672, 256)
    host_copies = {"h2d_bytes_per_s": (_host_copy, True), "d2h_bytes_per_s": (_host_copy, False)}
    return {
        "copy_bytes_per_s": (_copy,),
        **{f"matmul_{dtype}_per_s": (_matmul, dtype, size, size, size) for dtype in DTYPES},
        **(host_copies if bench.is_cuda else {}),
        "read_bytes_per_s": (_read,),
        **{f"narrow_{dtype}_per_s": (_matmul, dtype, 256, width, inner) for dtype in DTYPES},
    }


def _row(amount: float, seconds: list[float], unit: str, **details: Any) -> Row:
    per_s = amount / statistics.median(seconds)
    return {
        "per_s": per_s,
        "amount": amount,
        **median_and_spread(seconds),
        **details,
        "summary": f"{per_s / 1e12:.3f} {unit}",
    }


def _copy(bench: Bench) -> Row:
    num_bytes = bench.pick(4 * GIB, MIB)
    source = _random_bytes(bench, num_bytes)
    target = torch.empty_like(source)
    seconds = device_seconds(bench, lambda: target.copy_(source), repeats=30)
    return _row(2 * num_bytes, seconds, "TB/s read + written")


def _read(bench: Bench) -> Row:
    num_bytes = bench.pick(8 * GIB, MIB)
    source = _random_bytes(bench, num_bytes).view(torch.float32)
    seconds = device_seconds(bench, lambda: source.amax(), repeats=20)
    return _row(num_bytes, seconds, "TB/s read")


def _random_bytes(bench: Bench, num_bytes: int) -> torch.Tensor:
    """Returns bytes of normally distributed numbers."""
    return torch.randn(num_bytes // 4, device=bench.device).view(torch.uint8)


def _matmul(bench: Bench, dtype: str, m: int, k: int, n: int) -> Row:
    a = torch.randn((m, k), device=bench.device).to(DTYPES[dtype])
    # Shaped as in a linear layer: [out, in].
    b = torch.randn((n, k), device=bench.device).to(DTYPES[dtype])
    out = torch.empty((m, n), device=bench.device, dtype=DTYPES[dtype])
    seconds = device_seconds(bench, lambda: torch.mm(a, b.T, out=out), repeats=30)
    return _row(matmul_flops(m, k, n), seconds, "TFLOP/s", shape=[m, k, n])


def _host_copy(bench: Bench, to_device: bool) -> Row:
    num_bytes = bench.pick(GIB, MIB)
    device = _random_bytes(bench, num_bytes)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    host.copy_(device)
    target, source = (device, host) if to_device else (host, device)
    seconds = device_seconds(bench, lambda: target.copy_(source, non_blocking=True), repeats=15)
    row = _row(num_bytes, seconds, "")
    return row | {"summary": f"{row['per_s'] / 1e9:.1f} GB/s"}
