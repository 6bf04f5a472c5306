"""Times linear layers by the format of their weights: milliseconds per layer on one core, by the thread's own clock.

    python -m benchmarks.linear_kinds [--cpu x86-64-v3] [--dtype bfloat16] [--rows 1,4,32] [--rounds 10] [--out FILE]

A program multiplies rows by four layers of 2,816 to 5,760, nearly the shape of gpt-oss-20b's experts, with random
weights.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.harness import PAGE_AND_JSON, facts, heading, parser_of, publish, table

if TYPE_CHECKING:
    from alignedserve.ops.quantise import Part

NUM_IN, NUM_OUT, NUM_LAYERS = 2816, 5760, 4


@dataclass(frozen=True)
class Taken:
    kind: str
    # Milliseconds per layer, by number of rows.
    ms: dict[int, float]


def weights(dtype: str) -> dict[str, Part]:
    import torch

    from alignedserve.kernels.gguf import TYPES, GgufWeight
    from alignedserve.kernels.int4 import quantise_int4
    from alignedserve.kernels.quantised import MXFP4, QuantisedWeight, quantise_fp8, quantise_int8

    torch.manual_seed(0)
    plain = torch.randn(NUM_OUT, NUM_IN) * NUM_IN**-0.5
    codes, scales = torch.randint(0, 16, plain.shape), torch.ones(NUM_OUT, NUM_IN // 32)
    return {
        "in the dtype": plain,
        "int8": quantise_int8(plain),
        "int4": quantise_int4(plain),
        "fp8": quantise_fp8(plain),
        "mxfp4": QuantisedWeight(MXFP4, codes.byte(), scales.bfloat16(), None, 32),
        # All bits are zeros, which take no less time.
        **{
            name: GgufWeight(name, torch.zeros(NUM_OUT, NUM_IN // block.values * block.num_bytes).byte())
            for name, block in TYPES.items()
            if name != "MXFP4" and dtype == "bfloat16"
        },
    }


def measure(kind: str, weight: Part, dtype_name: str, rows: list[int], num_rounds: int) -> Taken:
    import torch

    from alignedserve.kernels.cpu.program import Value
    from alignedserve.ops.cpu_ops import CpuOps
    from alignedserve.ops.step import StepInputs

    torch.set_num_threads(1)
    ops = CpuOps(getattr(torch, dtype_name), num_threads=1)
    layers = [ops.linear_weight([weight]) for _ in range(NUM_LAYERS)]
    head = ops.linear_weight([torch.ones(1, NUM_OUT)])

    def of_rows(count: int) -> float:
        step, table = StepInputs(count, 1, 1), ops.parameter(torch.randn(count, NUM_IN))

        def forward(step: StepInputs) -> Value:
            x = ops.embed(table, step.token_ids)
            return [ops.linear(x, layer) for layer in layers][-1]

        model = ops.compile(forward, lambda x: ops.linear(x, head), step, 1)
        step.host.token_ids[:count] = range(count)
        step.host.query_start[:2], step.host.context_len[0] = [0, count], count
        step.commit(count, 1, 0)
        least_s = float("inf")
        for _ in range(num_rounds):
            begun_s = time.thread_time()
            model.forward()
            least_s = min(least_s, time.thread_time() - begun_s)
        return 1e3 * least_s / NUM_LAYERS

    return Taken(kind, {count: of_rows(count) for count in rows})


def page(about: dict[str, Any], cpu: str, dtype: str, found: list[Taken]) -> str:
    head = heading(
        "Linear layers by the kind of weights", about, f"built for {cpu}", f"rows in {dtype}", "one thread"
    )
    names = ("weights", *("1 row" if count == 1 else f"{count} rows" for count in found[0].ms))
    rows = [(each.kind, *(f"{ms:.2f}" for ms in each.ms.values())) for each in found]
    told = f"The table is in ms, for a layer of {NUM_IN:,} to {NUM_OUT:,}."
    return f"{head}. {told}\n\n{table(names, rows, 1)}\n"


def main() -> int:
    parser = parser_of(__doc__, rounds=10, out=PAGE_AND_JSON)
    parser.add_argument("--cpu", default="native", help="target of the kernels' build, such as x86-64-v3")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rows", default="1,4,32", help="numbers of rows, separated by commas")
    options = parser.parse_args()
    # Set before the library is loaded, which reads it.
    os.environ["ALIGNEDSERVE_CPU"] = options.cpu
    rows = [int(count) for count in options.rows.split(",")]
    taken = weights(options.dtype).items()
    found = [measure(kind, weight, options.dtype, rows, options.rounds) for kind, weight in taken]
    about = facts()
    publish(options.out, page(about, options.cpu, options.dtype, found), about | {"taken": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
