"""Measures the overhead of tensor-parallel ranks on this machine, and estimates steps on GPUs.

    python -m benchmarks.ranks [--models opt-125m,qwen3-0.6b] [--sizes 1,2] [--rounds 5] [--out FILE]

Measured: presets with random weights in bfloat16, with the same total number of threads, divided among ranks. It runs
decode steps of one and of 32 requests, in turn. The additional time over one rank is the cost of orders,
synchronisation and sums. Ranks synchronise twice per layer, and once for logits.

Estimated: the bytes that a rank reads in a step divided by its GPU's memory bandwidth, and two sums per layer over
NVLink. Bandwidths are from data sheets; for memory, the share that one H200 reached here (docs/gpu.md) is used. The
minimum of ten microseconds per sum is an assumption. None of this ran on several GPUs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from alignedserve import LLM
from alignedserve.models.listed_weights import num_weight_bytes
from alignedserve.models.presets import PRESETS
from alignedserve.models.source import resolve_model
from alignedserve.ops.shard import Shard
from benchmarks.harness import PAGE_AND_JSON, facts, heading, in_turn, parser_of, publish, table
from benchmarks.quantization import rate_of

# (simultaneous requests, tokens that each yields).
LOADS = ((1, 64), (32, 24))


@dataclass(frozen=True)
class Measured:
    model: str
    num_ranks: int
    threads_of_each: int
    num_requests: int
    # Per round.
    step_s: list[float]


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: float
    bytes_per_s: float
    link_bytes_per_s: float


@dataclass(frozen=True)
class OnPaper:
    model: str
    gpu: str
    num_ranks: int
    weight_gb_of_each: float
    kv_tokens: int
    step_ms: float
    exchange_ms: float


H100 = Gpu("H100 80 GB", 80e9, 3.35e12, 450e9)
H200 = Gpu("H200", 141e9, 4.8e12, 450e9)
# Share of the memory bandwidth that decode steps reach.
REACHED = 0.75
# Minimum seconds of a sum, however small it is.
SMALLEST_SUM_S = 10e-6
# Share of the memory for weights and KV.
USED = 0.90
CASES = [
    ("llama-3.1-8b", H100, (1, 2)),
    ("qwen3-32b", H100, (1, 2, 4)),
    ("llama-3.1-70b", H100, (2, 4, 8)),
    ("llama-3.1-70b", H200, (2, 4)),
]
# Simultaneous requests in the estimates, and the tokens that each attends to.
BATCH, CONTEXT = 64, 2048
# The heads of both tables.
MEASURED = ("model", "requests at once", "ranks", "threads of each", "step", "above one rank", "per exchange")
CALCULATED = ("model", "GPU", "ranks", "weights of each", "tokens of KV that fit", "step", "part for sums")


def measure(model: str, sizes: Sequence[int], num_rounds: int) -> list[Measured]:
    llms = {
        size: LLM(
            model,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            tensor_parallel_size=size,
            max_model_len=256,
            kv_cache_memory_bytes=1 << 30,
            use_tqdm=False,
        )
        for size in sizes
    }
    found = []
    for num_requests, num_tokens in LOADS:
        runs = {size: partial(rate_of, llm, num_requests, num_tokens) for size, llm in llms.items()}
        threads = torch.get_num_threads()
        for size, rates in in_turn(runs, num_rounds).items():
            steps_s = [num_requests / rate for rate in rates]
            found.append(Measured(model, size, max(threads // size, 1), num_requests, steps_s))
    return found


def on_paper(model: str, gpu: Gpu, size: int) -> OnPaper | None:
    """Returns the estimate, or None if the weights do not fit."""
    config = PRESETS[model]
    weights = num_weight_bytes(config, torch.bfloat16, None, shard=Shard(0, size))
    kv_heads = max(config.num_kv_heads // size, 1)
    token_bytes = 2 * 2 * config.num_layers * kv_heads * config.head_dim
    num_kv_tokens = int((USED * gpu.memory_bytes - weights) / token_bytes)
    if num_kv_tokens < config.max_position:
        return None
    batch = min(BATCH, num_kv_tokens // CONTEXT)
    # Only a few rows of the embeddings are read.
    read = weights - 2 * config.vocab_size * config.hidden_size + batch * CONTEXT * token_bytes
    summed = 2 * batch * config.hidden_size
    sums = 2 * config.num_layers * (SMALLEST_SUM_S + 2 * summed / gpu.link_bytes_per_s) if size > 1 else 0.0
    step = read / (REACHED * gpu.bytes_per_s) + sums
    return OnPaper(model, gpu.name, size, weights / 1e9, num_kv_tokens, step * 1e3, sums * 1e3)


def page(about: dict[str, Any], measured: Sequence[Measured], paper: Sequence[OnPaper]) -> str:
    rows: list[tuple[object, ...]] = []
    base: dict[tuple[str, int], float] = {}
    for each in measured:
        step_s = statistics.median(each.step_s)
        alone_s = base.setdefault((each.model, each.num_requests), step_s)
        num_meetings = 2 * resolve_model(each.model, "dummy").config.num_layers + 1
        above, exchange = f"{100 * (step_s / alone_s - 1):.0f} %", (step_s - alone_s) / num_meetings
        more = (above, f"{exchange * 1e6:.0f} µs") if each.num_ranks > 1 else ("", "")
        sizes = each.num_requests, each.num_ranks, each.threads_of_each
        rows.append((each.model, *sizes, f"{step_s * 1e3:.2f} ms", *more))
    calculated = [
        (
            *(each.model, each.gpu, each.num_ranks, f"{each.weight_gb_of_each:.1f} GB"),
            *(f"{each.kv_tokens:,}", f"{each.step_ms:.1f} ms", f"{each.exchange_ms:.1f} ms"),
        )
        for each in paper
    ]
    parts = (
        heading("Ranks of an instance on CPUs", about, f"{torch.get_num_threads()} threads in all"),
        table(MEASURED, rows, 1),
        f"Calculated for decode steps of {BATCH} requests, each of which attends to {CONTEXT:,} tokens:",
        table(CALCULATED, calculated, 2),
    )
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = parser_of(__doc__, rounds=5, out=PAGE_AND_JSON)
    parser.add_argument("--models", default="opt-125m,qwen3-0.6b", help="presets, separated by commas")
    parser.add_argument("--sizes", default="1,2", help="numbers of ranks, separated by commas")
    options = parser.parse_args()
    sizes = [int(each) for each in options.sizes.split(",")]
    models = [each for each in options.models.split(",") if each]
    measured = [each for model in models for each in measure(model, sizes, options.rounds)]
    paper = [found for model, gpu, each in CASES for size in each if (found := on_paper(model, gpu, size))]
    about = facts()
    content = about | {"measured": measured, "on_paper": paper}
    publish(options.out, page(about, measured, paper), content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
