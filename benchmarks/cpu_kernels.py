"""Times the CPU kernels on the shape of a 125M Llama in bfloat16: whole forwards, and each kind of operation.

    python -m benchmarks.cpu_kernels [--threads N] [--seconds S] [SCENARIO ...]

Times are medians over repetitions. GFLOP/s count multiplications and additions of unpadded values. GB/s count weights
and KV, read once per operation. The peaks, for the shares, depend on the machine: measure yours.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from alignedserve.kernels.cpu.sampling import argmax, gumbel_argmax
from alignedserve.kernels.cpu.structs import Op, OpKind
from alignedserve.ops.cpu_model import CpuModel
from alignedserve.ops.cpu_ops import CpuOps
from alignedserve.ops.step import StepInputs
from benchmarks.harness import parser_of, seconds_of
from tests.kernels.tiny_model import SHAPE_125M, Chunk, LlamaLike, fill_step, new_cache

BLOCK_SIZE = 16
SHAPE = SHAPE_125M


@dataclass(frozen=True)
class Scenario:
    name: str
    num_seqs: int
    query_len: int
    context_len: int


SCENARIOS = [
    Scenario("decode-1", 1, 1, 200),
    Scenario("decode-8", 8, 1, 200),
    Scenario("decode-32", 32, 1, 200),
    Scenario("decode-1-long", 1, 1, 3500),
    Scenario("prefill-16x128", 16, 128, 128),
    Scenario("prefill-1x2048", 1, 2048, 2048),
]


@dataclass
class Cost:
    seconds: float = 0.0
    flops: float = 0.0
    num_bytes: float = 0.0

    def __iadd__(self, other: Cost) -> Cost:
        self.seconds += other.seconds
        self.flops += other.flops
        self.num_bytes += other.num_bytes
        return self


def fill(step: StepInputs, scenario: Scenario) -> None:
    blocks = -(-scenario.context_len // BLOCK_SIZE)
    ids = torch.randint(0, SHAPE.vocab, (scenario.query_len,)).tolist()
    start = scenario.context_len - scenario.query_len
    chunks = [Chunk(ids, start, list(range(s * blocks, (s + 1) * blocks))) for s in range(scenario.num_seqs)]
    fill_step(step, chunks, BLOCK_SIZE)


def median_seconds(run: Callable[[], object], budget_s: float) -> float:
    run()
    times: list[float] = []
    deadline = time.perf_counter() + budget_s
    while time.perf_counter() < deadline or len(times) < 3:
        times.append(seconds_of(run))
    return statistics.median(times)


def cost_of(op: Op, num_rows: int, scenario: Scenario) -> Cost:
    args = op.args
    if op.kind == OpKind.LINEAR:
        columns = args.linear.out_features * (2 if args.linear.activation == 4 else 1)
        weight = columns * args.linear.in_features
        return Cost(0, 2.0 * num_rows * weight, 2.0 * weight)
    if op.kind == OpKind.ATTENTION:
        width = args.attention.num_heads * args.attention.head_dim
        before = scenario.context_len - scenario.query_len
        pairs = scenario.num_seqs * scenario.query_len * (before + (scenario.query_len + 1) / 2)
        kv = (
            scenario.num_seqs
            * scenario.context_len
            * args.attention.num_kv_heads
            * args.attention.head_dim
            * 2
        )
        return Cost(0, 4.0 * pairs * width, 2.0 * kv)
    return Cost()


def label(op: Op) -> str:
    if op.kind == OpKind.LINEAR:
        return f"linear {op.args.linear.in_features} -> {op.args.linear.out_features}"
    return OpKind(op.kind).name.lower()


def profile(
    model: CpuModel, rows: torch.Tensor, step: StepInputs, scenario: Scenario, budget_s: float
) -> dict[str, Cost]:
    samples: list[list[tuple[Op, float]]] = []
    deadline = time.perf_counter() + budget_s
    while time.perf_counter() < deadline or len(samples) < 3:
        samples.append(model.profile(rows))
    costs: dict[str, Cost] = {}
    in_logits = False
    for i, (op, _) in enumerate(samples[0]):
        in_logits |= op.kind == OpKind.GATHER
        cost = cost_of(op, len(rows) if in_logits else step.num_tokens, scenario)
        cost.seconds = statistics.median(sample[i][1] for sample in samples)
        costs.setdefault(label(op), Cost()).__iadd__(cost)
    return costs


def print_table(costs: dict[str, Cost], peak_gflops: float, peak_gbs: float) -> None:
    total = sum(cost.seconds for cost in costs.values())
    print(f"  {'operation':<24}{'ms':>8}{'share':>8}{'GFLOP/s':>9}{'of peak':>9}{'GB/s':>7}{'of peak':>9}")
    for name, cost in costs.items():
        gflops, gbs = cost.flops / cost.seconds * 1e-9, cost.num_bytes / cost.seconds * 1e-9
        row = f"  {name:<24}{cost.seconds * 1e3:>8.3f}{cost.seconds / total:>8.0%}"
        if cost.flops:
            row += f"{gflops:>9.0f}{gflops / peak_gflops:>9.0%}{gbs:>7.1f}{gbs / peak_gbs:>9.0%}"
        print(row)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("scenario", nargs="*", help=", ".join(s.name for s in SCENARIOS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    parser.add_argument("--peak-gflops", type=float, default=1150.0)
    parser.add_argument("--peak-gbs", type=float, default=100.0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    step = StepInputs(max_tokens=2048, max_seqs=32, max_blocks_per_seq=256)
    cache = new_cache(SHAPE, 32 * 13 + 256, BLOCK_SIZE, torch.bfloat16, fill=0.01)
    model = LlamaLike(CpuOps(torch.bfloat16), SHAPE).compile(step, cache)
    assert isinstance(model, CpuModel)
    for scenario in SCENARIOS:
        if args.scenario and scenario.name not in args.scenario:
            continue
        fill(step, scenario)
        rows = (step.query_start[1 : step.num_seqs + 1] - 1).clone()

        def whole(rows: torch.Tensor = rows) -> None:
            model.forward()
            argmax(model.logits(rows))

        print(f"{scenario.name}: {median_seconds(whole, args.seconds) * 1e3:.2f} ms with logits and argmax")
        print_table(profile(model, rows, step, scenario, args.seconds), args.peak_gflops, args.peak_gbs)
        logits, keys = model.logits(rows), torch.arange(len(rows))
        for name, run in (
            ("argmax", lambda x=logits: argmax(x)),
            ("gumbel", lambda x=logits, k=keys: gumbel_argmax(x, k)),
        ):
            print(f"  {name:<24}{median_seconds(run, 0.1) * 1e3:>8.3f}")


if __name__ == "__main__":
    main()
