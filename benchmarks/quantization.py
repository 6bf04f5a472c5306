"""Measures what quantised weights cost in answers, and save in time and bytes, on a CPU.

    python -m benchmarks.quantization [--num-per-task 200] [--models opt-125m,qwen3-0.6b] [--rounds 5] [--out FILE]

Answers: held-out prompts of all demo tasks, greedy; the perplexity of the right answers, teacher-forced; and the share
of tokens that equal float32's at the same position. Speed: presets with random weights, all schemes in one process, in
turn. It reports medians and their ratios. The printed page is also written to FILE.md, with all figures in FILE.json.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from alignedserve import LLM, SamplingParams, demo
from alignedserve.demo.tasks import TaskExample, expected_output_len
from alignedserve.engine.config import QUANTIZATIONS
from alignedserve.models.listed_weights import num_weight_bytes
from alignedserve.models.source import resolve_model
from alignedserve.text.tokenizer import Tokenizer
from benchmarks.harness import (
    PAGE_AND_JSON,
    facts,
    heading,
    in_turn,
    parser_of,
    publish,
    say,
    seconds_of,
    table,
)
from research.demo_model.evaluate import AnsweredTask, held_out

# Options of `LLM`. The others are compared with the first.
ANSWERED = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    **{each: {"dtype": "bfloat16", "quantization": each} for each in QUANTIZATIONS},
}
TIMED: tuple[str | None, ...] = (None, *QUANTIZATIONS)
# (simultaneous requests, tokens that each yields).
LOADS = ((1, 64), (4, 48), (32, 32))
PROMPT_TOKENS, MAX_MODEL_LEN = 32, 2048


@dataclass(frozen=True)
class Answers:
    name: str
    num_right: int
    num_asked: int
    perplexity: float
    # Share of tokens that equal float32's at the same position.
    same_tokens: float


@dataclass(frozen=True)
class Speed:
    model: str
    quantization: str | None
    weight_bytes: int
    num_requests: int
    # Per round.
    tokens_per_s: list[float]


# ---- answers ---------------------------------------------------------------------------------------------------------


def answers_of_all(kinds: Mapping[str, Mapping[str, str]], examples: Sequence[TaskExample]) -> list[Answers]:
    """`kinds`: options of `LLM` by name. The first has float32."""
    answers: list[Answers] = []
    exact: list[list[int]] = []
    for name, options in kinds.items():
        found, said = answers_of(name, options, examples, exact)
        answers.append(found)
        exact = exact or said
        say(str(found))
    return answers


def answers_of(
    name: str, options: Mapping[str, Any], examples: Sequence[TaskExample], exact: list[list[int]]
) -> tuple[Answers, list[list[int]]]:
    """`exact`: float32's answers, or empty."""
    llm = LLM(str(demo.MODEL_DIR), **options, use_tqdm=False)
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
    return Answers(name, num_right, len(examples), lost, sum(same) / len(same)), said


def perplexity(
    llm: LLM, tokenizer: Tokenizer, prompts: Sequence[list[int]], examples: Sequence[TaskExample]
) -> float:
    """Returns the perplexity of the right answers."""
    assert tokenizer.eos_token_id is not None
    wholes = [
        [*prompt, *tokenizer.encode(each.answer, False), tokenizer.eos_token_id]
        for prompt, each in zip(prompts, examples, strict=True)
    ]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": each} for each in wholes], params, use_tqdm=False)
    losses: list[float] = []
    for prompt, whole, output in zip(prompts, wholes, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, logprobs in list(zip(whole, output.prompt_logprobs, strict=True))[len(prompt) :]:
            assert logprobs is not None
            losses.append(-logprobs[token].logprob)
    return math.exp(sum(losses) / len(losses))


# ---- speed -----------------------------------------------------------------------------------------------------------


def speeds_of(model: str, num_rounds: int) -> list[Speed]:
    config = resolve_model(model, "dummy").config
    llms = {
        each: LLM(
            model,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            quantization=each,
            max_model_len=256,
            kv_cache_memory_bytes=1 << 30,
            use_tqdm=False,
        )
        for each in TIMED
    }
    found = []
    for num_requests, num_tokens in LOADS:
        runs = {each: partial(rate_of, llm, num_requests, num_tokens) for each, llm in llms.items()}
        for each, rates in in_turn(runs, num_rounds).items():
            num_bytes = num_weight_bytes(config, torch.bfloat16, None, each)
            found.append(Speed(model, each, num_bytes, num_requests, rates))
    return found


def rate_of(llm: LLM, num_requests: int, num_tokens: int) -> float:
    """Returns tokens per second, without the time to first token."""
    prompts = [{"prompt_token_ids": [number + 5] * PROMPT_TOKENS} for number in range(num_requests)]
    times = []
    for count in (1, num_tokens + 1):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        times.append(seconds_of(partial(llm.generate, prompts, params, use_tqdm=False)))
    return num_requests * num_tokens / (times[1] - times[0])


# ---- the page --------------------------------------------------------------------------------------------------------


def page(about: dict[str, Any], answers: Sequence[Answers], speeds: Sequence[Speed]) -> str:
    rows = []
    base: dict[tuple[str, int], float] = {}
    for speed in speeds:
        rate = statistics.median(speed.tokens_per_s)
        ratio = rate / base.setdefault((speed.model, speed.num_requests), rate)
        name = speed.model, speed.quantization or "bfloat16"
        gigabytes = f"{speed.weight_bytes / 1e9:.2f}"
        rows.append((*name, gigabytes, speed.num_requests, f"{rate:.1f}", f"{ratio:.2f} x"))
    parts = (
        heading("Weights in 8 and 4 bits", about, f"{torch.get_num_threads()} threads"),
        answers_table(answers),
        table(("model", "weights in", "GB", "requests at once", "tokens/s", "to bfloat16"), rows, 2),
    )
    return "\n\n".join(parts) + "\n"


def answers_table(answers: Sequence[Answers]) -> str:
    head = ("of the demo model", "exact answers", "perplexity of right answers", "tokens as in float32")
    rows = []
    for each in answers:
        share = f"{each.num_right} of {each.num_asked} ({100 * each.num_right / each.num_asked:.2f} %)"
        rows.append((each.name, share, f"{each.perplexity:.6f}", f"{100 * each.same_tokens:.2f} %"))
    return table(head, rows, 1)


def main() -> int:
    parser = parser_of(__doc__, rounds=5, out=PAGE_AND_JSON)
    parser.add_argument("--num-per-task", type=int, default=200)
    parser.add_argument(
        "--models", default="opt-125m,qwen3-0.6b", help="presets, separated by commas; may be none"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    examples = [each for task in held_out(options.num_per_task, options.seed).values() for each in task]
    answers = answers_of_all(ANSWERED, examples)
    speeds = [
        each for model in options.models.split(",") if model for each in speeds_of(model, options.rounds)
    ]
    about = facts()
    publish(options.out, page(about, answers, speeds), about | {"answers": answers, "speeds": speeds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
