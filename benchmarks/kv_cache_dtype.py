"""Measures what 8-bit KV (`--kv-cache-dtype`) costs in answers and saves in attention time and bytes, on a CPU.

    python -m benchmarks.kv_cache_dtype [--num-per-task 200] [--rounds 25] [--threads 1,2] [--out FILE]

Answers: held-out prompts of all demo tasks, greedy; the perplexity of the right answers, teacher-forced; and the share
of tokens that equal float32's at the same position. Speed: attention of one new token per sequence, over random KV in
shuffled blocks, in all layers of a model. All kinds run in turn. The least time of all rounds is reported, since other
load on the machine only adds time. The printed page is also written to FILE.md, with all figures in FILE.json.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from alignedserve.kernels.cpu.structs import OpKind
from alignedserve.kernels.kv_rows import to_rows
from alignedserve.kv.format import KV_CACHE_DTYPES, BlockFormat
from alignedserve.ops.cpu_model import CpuModel
from alignedserve.ops.cpu_ops import CpuOps
from alignedserve.ops.step import StepInputs
from benchmarks.harness import PAGE_AND_JSON, facts, heading, in_turn, parser_of, publish, table
from benchmarks.quantization import Answers, answers_of_all, answers_table
from research.demo_model.evaluate import held_out
from tests.kernels.tiny_model import Chunk, LlamaLike, Shape, fill_step

# Options of `LLM`. The others are compared with the first.
ANSWERED = {
    "float32": {"dtype": "float32"},
    **{
        "bfloat16" if each == "auto" else f"bfloat16, KV {each}": {
            "dtype": "bfloat16",
            "kv_cache_dtype": each,
        }
        for each in KV_CACHE_DTYPES
    },
}
BLOCK_SIZE = 16
# Shapes of a 125M Llama, of Qwen3 0.6B and of Llama 3.1 8B in attention. The larger ones have fewer layers.
SHAPES = {
    "12 heads, 4 of KV, 64 wide, 12 layers": Shape(256, 256, 12, 12, 4, 64, 100, 20000),
    "16 heads, 8 of KV, 128 wide, 4 layers": Shape(256, 256, 4, 16, 8, 128, 100, 20000),
    "32 heads, 8 of KV, 128 wide, 4 layers": Shape(256, 256, 4, 32, 8, 128, 100, 20000),
}
# (sequences, tokens that each attends to).
LOADS = ((1, 4096), (4, 4096), (1, 16384))


@dataclass(frozen=True)
class Speed:
    shape: str
    num_seqs: int
    context_len: int
    num_threads: int
    kv_cache_dtype: str
    kv_bytes: int
    # Attention in all layers, per round.
    seconds: list[float]


# ---- speed -----------------------------------------------------------------------------------------------------------


def speeds_of(name: str, num_seqs: int, context_len: int, num_threads: int, num_rounds: int) -> list[Speed]:
    torch.set_num_threads(num_threads)
    shape = SHAPES[name]
    num_blocks = num_seqs * context_len // BLOCK_SIZE
    order = torch.randperm(num_blocks).tolist()
    models = {each: model_of(shape, each, num_seqs, context_len, order) for each in KV_CACHE_DTYPES}
    runs = {each: partial(attention_s, model) for each, model in models.items()}
    return [
        Speed(
            name,
            num_seqs,
            context_len,
            num_threads,
            each,
            num_blocks * form_of(shape, each).block_bytes,
            seconds,
        )
        for each, seconds in in_turn(runs, num_rounds, num_warm_ups=1).items()
    ]


def form_of(shape: Shape, kv_cache_dtype: str) -> BlockFormat:
    return BlockFormat(
        shape.num_layers,
        BLOCK_SIZE,
        shape.num_kv_heads,
        shape.head_dim,
        "bfloat16",
        KV_CACHE_DTYPES[kv_cache_dtype],
    )


def model_of(
    shape: Shape, kv_cache_dtype: str, num_seqs: int, context_len: int, order: Sequence[int]
) -> CpuModel:
    form, num_each = form_of(shape, kv_cache_dtype), context_len // BLOCK_SIZE
    cache = torch.empty((len(order), *form.shape), dtype=getattr(torch, form.torch_dtype))
    values = torch.randn((*form.shape[:-1], form.head_dim), generator=torch.Generator().manual_seed(0))
    cache.copy_(to_rows(values.bfloat16(), cache.dtype).expand_as(cache))
    step = StepInputs(num_seqs, num_seqs, num_each)
    model = LlamaLike(CpuOps(torch.bfloat16), shape).compile(step, cache)
    assert isinstance(model, CpuModel)
    chunks = [
        Chunk([seq], context_len - 1, list(order[seq * num_each : (seq + 1) * num_each]))
        for seq in range(num_seqs)
    ]
    fill_step(step, chunks, BLOCK_SIZE)
    return model


def attention_s(model: CpuModel) -> float:
    timed = model.profile(torch.zeros(1, dtype=torch.int32))
    return sum(seconds for op, seconds in timed if op.kind == OpKind.ATTENTION)


# ---- the page --------------------------------------------------------------------------------------------------------


def page(about: dict[str, Any], answers: Sequence[Answers], speeds: Sequence[Speed]) -> str:
    base, rows = 0.0, []
    for speed in speeds:
        least = min(speed.seconds)
        base = least if speed.kv_cache_dtype == "auto" else base
        kind = "bfloat16" if speed.kv_cache_dtype == "auto" else speed.kv_cache_dtype
        load = f"{speed.num_seqs} x {speed.context_len}", speed.num_threads
        megabytes = f"{speed.kv_bytes / 1e6:.0f}"
        rows.append((speed.shape, *load, kind, megabytes, f"{1000 * least:.2f}", f"{base / least:.2f} x"))
    head = ("attention in bfloat16, of", "contexts", "threads", "KV", "MB", "ms", "faster")
    parts = (heading("KV in 8 bits in instances", about), answers_table(answers), table(head, rows, 1))
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = parser_of(__doc__, rounds=25, out=PAGE_AND_JSON)
    parser.add_argument("--num-per-task", type=int, default=200, help="prompts per task; 0 skips the answers")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, separated by commas")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    answers: list[Answers] = []
    if options.num_per_task:
        examples = [each for task in held_out(options.num_per_task, options.seed).values() for each in task]
        answers = answers_of_all(ANSWERED, examples)
    speeds = [
        speed
        for num_threads in map(int, options.threads.split(","))
        for name in SHAPES
        for load in LOADS
        for speed in speeds_of(name, *load, num_threads, options.rounds)
    ]
    about = facts()
    publish(options.out, page(about, answers, speeds), about | {"answers": answers, "speeds": speeds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
