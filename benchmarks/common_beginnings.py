"""Times decode attention of rows that begin alike: with the beginning in common blocks, which are read once, and with a
copy for each row.

    python -m benchmarks.common_beginnings [--threads N] [--seconds S] [--out FILE]

The shape is that of a 125M Llama in bfloat16, with three layers, so that small caches are no better off. Both cases of
a line are timed alternately, per layer; planning is included. GB/s: KV bytes of the copies. GFLOP/s: products of the
shared run.
"""

from __future__ import annotations

import dataclasses
import statistics
import time

import torch

from alignedserve.kernels.cpu.structs import OpKind
from alignedserve.ops.cpu_model import CpuModel
from alignedserve.ops.cpu_ops import CpuOps
from alignedserve.ops.step import StepInputs
from benchmarks.harness import JSON_FILE, cpu_name, facts, parser_of, write_json
from tests.kernels.tiny_model import SHAPE_125M, Chunk, LlamaLike, fill_step, new_cache

BLOCK_SIZE = 16
SHAPE = dataclasses.replace(SHAPE_125M, num_layers=3, vocab=101, max_position=16_384)


@dataclasses.dataclass(frozen=True)
class Case:
    common: int
    own: int
    rows: int
    # How many different beginnings there are.
    beginnings: int = 1


CASES = [
    Case(2000, 150, 64),
    Case(4096, 16, 64),
    Case(8000, 150, 64),
    Case(2000, 150, 60, 20),
    Case(64, 4000, 64),
    Case(2000, 150, 4),
    Case(128, 150, 64),
    Case(0, 300, 32),
    Case(0, 4096, 8),
]


def model_of(case: Case, is_shared: bool, num_threads: int) -> CpuModel:
    """Returns a model with a step in which each row decodes a token."""
    common, own = case.common // BLOCK_SIZE, case.own // BLOCK_SIZE + 1
    num_beginnings = case.beginnings if is_shared else case.rows
    step = StepInputs(case.rows, case.rows, common + own)
    free = common * num_beginnings
    cache = new_cache(SHAPE, free + own * case.rows, BLOCK_SIZE, torch.bfloat16, fill=0.01)
    model = LlamaLike(CpuOps(torch.bfloat16, num_threads), SHAPE).compile(step, cache)
    assert isinstance(model, CpuModel)
    chunks = []
    for row in range(case.rows):
        first, last = row % num_beginnings * common, free + row * own
        blocks = [*range(first, first + common), *range(last, last + own)]
        chunks.append(Chunk([5], case.common + case.own, blocks))
    fill_step(step, chunks, BLOCK_SIZE)
    return model


def attention_s(model: CpuModel, rows: torch.Tensor) -> float:
    """Returns the seconds of a layer's attention. The first operation's time includes the plan of the step."""
    timed = model.profile(rows)
    seconds = timed[0][1] + sum(seconds for op, seconds in timed if op.kind == OpKind.ATTENTION)
    return seconds / SHAPE.num_layers


def measure(case: Case, num_threads: int, budget_s: float) -> tuple[float, float]:
    """Returns the median seconds with common blocks and with copies."""
    models = [model_of(case, is_shared, num_threads) for is_shared in (True, False)]
    rows = torch.arange(1, dtype=torch.int32)
    times: tuple[list[float], list[float]] = ([], [])
    for model in models:
        attention_s(model, rows)
    deadline = time.perf_counter() + budget_s
    while time.perf_counter() < deadline or len(times[0]) < 5:
        for model, found in zip(models, times, strict=True):
            found.append(attention_s(model, rows))
    shared_s, copied_s = map(statistics.median, times)
    return shared_s, copied_s


def num_bytes(case: Case) -> float:
    """Returns the bytes of K and V of all rows."""
    return 4.0 * SHAPE.num_kv_heads * SHAPE.head_dim * (case.common + case.own) * case.rows


def num_products(case: Case) -> float:
    return 2.0 * SHAPE.num_heads * SHAPE.head_dim * case.rows * (case.common + case.own)


def main() -> None:
    parser = parser_of(__doc__, out=JSON_FILE)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="per case")
    args = parser.parse_args()
    print(f"{cpu_name()}, {args.threads} threads, bfloat16, attention of a layer")
    print(" common   own  rows beginnings    copies      once  ratio   GB/s  GFLOP/s")
    found = []
    for case in CASES:
        shared_s, copied_s = measure(case, args.threads, args.seconds)
        gbs, gflops = num_bytes(case) / copied_s * 1e-9, 2 * num_products(case) / shared_s * 1e-9
        print(
            f"{case.common:>7} {case.own:>5} {case.rows:>5} {case.beginnings:>10} {copied_s * 1e3:>6.2f} ms "
            f"{shared_s * 1e3:>6.2f} ms {copied_s / shared_s:>6.2f} {gbs:>6.1f} {gflops:>8.0f}",
            flush=True,
        )
        found.append(dataclasses.asdict(case) | {"once_s": shared_s, "copies_s": copied_s})
    write_json(args.out, facts() | {"threads": args.threads, "cases": found})


if __name__ == "__main__":
    main()
