"""Measures what 8-bit KV (`--kv-cache-dtype`) costs in answers and saves in attention time and bytes, on a CPU.

    python -m benchmarks.kv_cache_dtype [--num-per-task 200] [--rounds 25] [--threads 1,2] [--out FILE]

Answers: held-out prompts of all demo tasks, greedy; the perplexity of the right answers, teacher-forced; and the share
of tokens that equal float32's at the same position. Speed: attention of one new token per sequence, over random KV in
shuffled blocks, in all layers of a model. All kinds run in turn. The least time of all rounds is reported, since other
load on the machine only adds time. The printed page is also written to FILE.md, with all figures in FILE.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from alignedserve import LLM, SamplingParams, demo
from alignedserve.demo.evaluate import AnsweredTask, held_out
from alignedserve.demo.tasks import TaskExample, expected_output_len
from alignedserve.kernels.cpu.structs import OpKind
from alignedserve.kernels.kv_rows import to_rows
from alignedserve.kv.format import KV_CACHE_DTYPES, BlockFormat
from alignedserve.ops.cpu_model import CpuModel
from alignedserve.ops.cpu_ops import CpuOps
from alignedserve.ops.step import StepInputs
from alignedserve.text.tokenizer import Tokenizer
from benchmarks.cpu_vs_vllm import cpu_name
from benchmarks.pages import command_of, publish
from benchmarks.progress import say
from benchmarks.quantization import perplexity
from tests.kernels.tiny_model import Chunk, LlamaLike, Shape, fill_step

# (dtype, kv_cache_dtype); the others are compared with the first.
ANSWERED = (("float32", "auto"), *(("bfloat16", each) for each in KV_CACHE_DTYPES))
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
class Answers:
    dtype: str
    kv_cache_dtype: str
    num_right: int
    num_asked: int
    perplexity: float
    # Share of tokens that equal float32's at the same position.
    same_tokens: float


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


# ---- answers ---------------------------------------------------------------------------------------------------------


def answers_of(
    dtype: str, kv_cache_dtype: str, examples: Sequence[TaskExample], exact: list[list[int]]
) -> tuple[Answers, list[list[int]]]:
    """`exact`: float32's answers, or empty."""
    llm = LLM(str(demo.MODEL_DIR), dtype=dtype, kv_cache_dtype=kv_cache_dtype, use_tqdm=False)
    tokenizer = Tokenizer.from_directory(demo.MODEL_DIR)
    prompts = [tokenizer.chat_ids([{"role": "user", "content": each.prompt}]) for each in examples]
    params = [SamplingParams(temperature=0, max_tokens=expected_output_len(each) + 8) for each in examples]
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    said = [list(each.outputs[0].token_ids) for each in outputs]
    num_right = sum(
        AnsweredTask(example, output.outputs[0].text, len(tokens)).is_right
        for example, output, tokens in zip(examples, outputs, said, strict=True)
    )
    same = [x == y for a, b in zip(said, exact or said, strict=True) for x, y in zip(a, b, strict=False)]
    lost = perplexity(llm, tokenizer, prompts, examples)
    share = sum(same) / len(same)
    return Answers(dtype, kv_cache_dtype, num_right, len(examples), lost, share), said


# ---- speed -----------------------------------------------------------------------------------------------------------


def speeds_of(name: str, num_seqs: int, context_len: int, num_threads: int, num_rounds: int) -> list[Speed]:
    torch.set_num_threads(num_threads)
    shape = SHAPES[name]
    num_blocks = num_seqs * context_len // BLOCK_SIZE
    order = torch.randperm(num_blocks).tolist()
    models = {each: model_of(shape, each, num_seqs, context_len, order) for each in KV_CACHE_DTYPES}
    seconds: dict[str, list[float]] = {each: [] for each in KV_CACHE_DTYPES}
    for _ in range(num_rounds + 1):
        for each, model in models.items():
            seconds[each].append(attention_s(model))
    return [
        Speed(
            name,
            num_seqs,
            context_len,
            num_threads,
            each,
            num_blocks * form_of(shape, each).block_bytes,
            # The first round is not counted.
            seconds[each][1:],
        )
        for each in KV_CACHE_DTYPES
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


def page(command: str, answers: Sequence[Answers], speeds: Sequence[Speed]) -> str:
    """Markdown."""
    lines = [
        "# KV in 8 bits in instances",
        "",
        f"`{command}`, {cpu_name()}",
        "",
        "| of the demo model | exact answers | perplexity of right answers | tokens as in float32 |",
        "| --- | ---: | ---: | ---: |",
    ]
    for each in answers:
        share = f"{each.num_right} of {each.num_asked} ({100 * each.num_right / each.num_asked:.2f} %)"
        kind = each.dtype if each.kv_cache_dtype == "auto" else f"{each.dtype}, KV {each.kv_cache_dtype}"
        lines.append(f"| {kind} | {share} | {each.perplexity:.6f} | {100 * each.same_tokens:.2f} % |")
    lines += [
        "",
        "| attention in bfloat16, of | contexts | threads | KV | MB | ms | faster |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    base = 0.0
    for speed in speeds:
        least = min(speed.seconds)
        base = least if speed.kv_cache_dtype == "auto" else base
        kind = "bfloat16" if speed.kv_cache_dtype == "auto" else speed.kv_cache_dtype
        lines.append(
            f"| {speed.shape} | {speed.num_seqs} x {speed.context_len} | {speed.num_threads} | {kind} "
            f"| {speed.kv_bytes / 1e6:.0f} | {1000 * least:.2f} | {base / least:.2f} x |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-per-task", type=int, default=200, help="prompts per task; 0 skips the answers")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", default="1,2", help="numbers of threads, separated by commas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="base name of FILE.md and FILE.json")
    options = parser.parse_args()
    answers: list[Answers] = []
    exact: list[list[int]] = []
    if options.num_per_task:
        examples = [each for task in held_out(options.num_per_task, options.seed).values() for each in task]
        for kind in ANSWERED:
            found, said = answers_of(*kind, examples, exact)
            answers.append(found)
            exact = exact or said
            say(str(found))
    speeds = [
        speed
        for num_threads in map(int, options.threads.split(","))
        for name in SHAPES
        for load in LOADS
        for speed in speeds_of(name, *load, num_threads, options.rounds)
    ]
    command = command_of("kv_cache_dtype")
    publish(page(command, answers, speeds), command, {"answers": answers, "speeds": speeds}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
