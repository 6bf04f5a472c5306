"""Compares linear layers, built for this processor or another, with torch's product in float32.

    python -m benchmarks.linear_vs_torch [--cpu x86-64-v3] [--rows 1,8,32,64] [--rounds 20] [--out FILE]

It runs on one thread and takes the least time of all rounds, by the thread's own clock, so that other load counts
little. Eight layers of 2,048 x 2,048 with random weights run in turn. With `--cpu x86-64-v3` (AVX2), torch's libraries
are limited to AVX2 by environment variables. Libraries may interpret these differently on another maker's processors.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import PAGE_AND_JSON, facts, heading, parser_of, publish, table

WIDTH, NUM_LAYERS = 2048, 8
# Limits torch's libraries to AVX2.
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


@dataclass(frozen=True)
class Rates:
    rows: int
    # GFLOP per second.
    ours_float32: float
    ours_bfloat16: float
    torch_float32: float


def measure(rows: int, num_rounds: int) -> Rates:
    import torch

    from alignedserve.kernels.cpu.program import Value
    from alignedserve.ops.cpu_ops import CpuOps
    from alignedserve.ops.step import StepInputs

    torch.set_num_threads(1)
    torch.manual_seed(0)
    matrices = [torch.randn(WIDTH, WIDTH) * WIDTH**-0.5 for _ in range(NUM_LAYERS)]

    def ours(dtype: torch.dtype) -> float:
        ops = CpuOps(dtype, num_threads=1)
        table, layers = (
            ops.parameter(torch.randn(rows, WIDTH)),
            [ops.linear_weight([each]) for each in matrices],
        )
        step = StepInputs(rows, 1, rows)

        def forward(step: StepInputs) -> Value:
            x = ops.embed(table, step.token_ids)
            for layer in layers:
                x = ops.linear(x, layer)
            return x

        model = ops.compile(forward, lambda x: ops.linear(x, layers[0]), step, 1)
        step.host.query_start[:2], step.host.context_len[0] = [0, rows], rows
        step.host.token_ids[:rows] = range(rows)
        step.commit(rows, 1, 0)
        return rate(model.forward)

    def theirs() -> float:
        x = torch.randn(rows, WIDTH)

        def forward() -> None:
            y = x
            for each in matrices:
                y = torch.nn.functional.linear(y, each)

        return rate(forward)

    def rate(run: Callable[[], object]) -> float:
        least_s = float("inf")
        for _ in range(num_rounds):
            begun_s = time.thread_time()
            run()
            least_s = min(least_s, time.thread_time() - begun_s)
        return 2 * rows * WIDTH * WIDTH * NUM_LAYERS / least_s / 1e9

    return Rates(rows, ours(torch.float32), ours(torch.bfloat16), theirs())


def page(about: dict[str, Any], cpu: str, found: list[Rates]) -> str:
    head = heading("Linear layers compared with torch", about, f"built for {cpu}", "one thread")
    names = ("rows", "float32", "bfloat16", "torch, float32", "float32 to torch", "bfloat16 to torch")
    rows = []
    for each in found:
        ours = each.ours_float32, each.ours_bfloat16
        ratios = [f"{rate / each.torch_float32:.2f}" for rate in ours]
        rows.append((each.rows, *(f"{rate:.0f}" for rate in (*ours, each.torch_float32)), *ratios))
    return f"{head}. The table is in GFLOP/s.\n\n{table(names, rows, 0)}\n"


def main() -> int:
    parser = parser_of(__doc__, rounds=20, out=PAGE_AND_JSON)
    parser.add_argument("--cpu", default="native", help="target of the kernels' build, such as x86-64-v3")
    parser.add_argument("--rows", default="1,8,32,64", help="numbers of rows, separated by commas")
    options = parser.parse_args()
    # Set before the libraries are loaded, which read these.
    os.environ["ALIGNEDSERVE_CPU"] = options.cpu
    if options.cpu == "x86-64-v3":
        os.environ.update(AVX2)
    found = [measure(int(rows), options.rounds) for rows in options.rows.split(",")]
    about = facts()
    publish(options.out, page(about, options.cpu, found), about | {"rates": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
