"""Measures what int8 KV in the pool costs in correct answers and saves in bytes, with the demo model on a CPU.

    python -m benchmarks.int8_kv [--num-per-task 200] [--num-forced 40] [--dtype bfloat16] [--out FILE]

Answers: `alignedserve serve` runs one prefill and one decode instance with link host, so that all KV of a prompt passes
through the pool. It answers held-out prompts of all demo tasks, greedily, once with each `--pool-kv-dtype`. Perplexity:
that of the right answers, teacher-forced, over KV of the prompt that was saved in the pool's format and loaded again.
The printed page is also written to FILE.md, with all figures in FILE.json.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai

from alignedserve import demo
from alignedserve.demo.tasks import TASKS, TaskExample
from alignedserve.engine.build import build_engine
from alignedserve.engine.config import EngineConfig
from alignedserve.engine.engine import Engine
from alignedserve.engine.request import NewRequest, Request
from alignedserve.instance.direct import DirectEngine
from alignedserve.kv.format import POOL_KV_DTYPES, BlockFormat
from alignedserve.launch.ports import free_port
from alignedserve.sampling_params import SamplingParams
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.transport.completions import Completions, Outcome
from alignedserve.transport.mover import Mover, PoolBlocks
from alignedserve.types import Epoch, PoolBlockId, RequestId, RequestKey
from benchmarks.harness import PAGE_AND_JSON, facts, heading, parser_of, progress, publish, table
from benchmarks.rt_with_be.served import running
from research.demo_model.evaluate import AnsweredTask, held_out

HOST, START_S, AT_ONCE = "127.0.0.1", 300.0, 24
# The largest loss that meets the aim, in percentage points of exact answers.
MOST_LOST = 0.3
MAX_MODEL_LEN = 2048
# For the table of sizes.
BLOCK_SIZES = (16, 32, 64)


@dataclass(frozen=True)
class Share:
    num_right: int
    num_asked: int

    @property
    def percent(self) -> float:
        return 100 * self.num_right / self.num_asked


@dataclass(frozen=True)
class Agreement:
    """Agreement between the answers with int8 and those without."""

    num_same_answers: int
    num_answers: int
    num_same_tokens: int
    num_tokens: int


# ---- answers ---------------------------------------------------------------------------------------------------------


def served_answers(pool_kv_dtype: str, dtype: str, examples: Sequence[TaskExample]) -> list[AnsweredTask]:
    port = free_port(HOST)
    with tempfile.TemporaryDirectory(prefix="state-", dir="/tmp", ignore_cleanup_errors=True) as state:
        command = [sys.executable, "-m", "alignedserve", "serve", "--pool-kv-dtype", pool_kv_dtype]
        command += ["--host", HOST, "--port", str(port), "--state-dir", state, "--device", "cpu"]
        command += ["--link", "host", "--dtype", dtype, "--prefill-instances", "1", "--decode-instances", "1"]
        with running(command, Path(state) / "log", "ready after", START_S):
            return asyncio.run(_ask_all(f"http://{HOST}:{port}/v1", examples, pool_kv_dtype))


async def _ask_all(url: str, examples: Sequence[TaskExample], name: str) -> list[AnsweredTask]:
    turn = asyncio.Semaphore(AT_ONCE)
    with progress(len(examples), "answers") as bar:
        bar.set_description(name)
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:

            async def ask(example: TaskExample) -> AnsweredTask:
                async with turn:
                    answer = await client.chat.completions.create(
                        model="demo",
                        messages=[{"role": "user", "content": example.prompt}],
                        temperature=0,
                        max_tokens=256,
                        timeout=600,
                    )
                bar.update()
                assert answer.usage
                return AnsweredTask(
                    example, answer.choices[0].message.content or "", answer.usage.completion_tokens
                )

            return await asyncio.gather(*map(ask, examples))


def share(answers: Sequence[AnsweredTask]) -> Share:
    return Share(sum(each.is_right for each in answers), len(answers))


def agreement(
    tokenizer: Tokenizer, ours: Sequence[AnsweredTask], theirs: Sequence[AnsweredTask]
) -> Agreement:
    pairs = [
        (tokenizer.encode(a.text, False), tokenizer.encode(b.text, False))
        for a, b in zip(ours, theirs, strict=True)
    ]
    return Agreement(
        num_same_answers=sum(a == b for a, b in pairs),
        num_answers=len(pairs),
        num_same_tokens=sum(x == y for a, b in pairs for x, y in zip(a, b, strict=False)),
        num_tokens=sum(max(len(a), len(b)) for a, b in pairs),
    )


# ---- perplexity ------------------------------------------------------------------------------------------------------


class Forced:
    """Scores one request at a time: its prompt is computed, saved to the pool and loaded again, and then the answer is
    scored."""

    def __init__(self, engine: Engine, pool_kv_dtype: str) -> None:
        form = engine.format.in_pool(pool_kv_dtype)
        self._direct = DirectEngine(engine)
        self._engine = engine
        self._completions = Completions()
        self._pool = np.zeros((form.num_columns(MAX_MODEL_LEN), form.block_bytes), np.uint8)
        self._mover = Mover(engine.cache.parts, PoolBlocks(self._pool, form), Epoch(1), self._completions)

    def nll(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """Returns the sum of the answer's negative log-probabilities."""
        # The prompt's last token is computed after the load, which predicts the answer's first token.
        num_away = len(prompt) - 1
        self._compute_and_save(prompt, num_away)
        request = self._adopt([*prompt, *answer], num_away)
        self._copy(request, num_away, is_save=False)
        self._direct.join(request)
        (output,) = self._direct.execute([(request, request.num_pending)])
        self._direct.part(request)
        self._direct.release(request)
        assert output.prompt_logprobs and len(output.prompt_logprobs) == len(answer)
        return -sum(each.logprobs[0] for each in output.prompt_logprobs)

    def close(self) -> None:
        self._mover.close()

    def _compute_and_save(self, prompt: Sequence[int], num_tokens: int) -> None:
        request = self._adopt(prompt, 0)
        self._direct.join(request)
        self._direct.execute([(request, num_tokens)])
        self._direct.part(request)
        self._copy(request, num_tokens, is_save=True)
        # Clears the blocks, so that a failed load can't go unnoticed.
        self._engine.cache.blocks[self._direct.blocks_of(request)] = 0
        self._direct.release(request)

    def _adopt(self, tokens: Sequence[int], num_computed: int) -> Request:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        return self._direct.adopt(NewRequest(RequestId("1"), tokens, params, 0, num_computed=num_computed))

    def _copy(self, request: Request, num_tokens: int, is_save: bool) -> None:
        blocks = self._direct.blocks_of(request)[: self._engine.format.num_columns(num_tokens)]
        pairs = [(block, PoolBlockId(number)) for number, block in enumerate(blocks)]
        if is_save:
            num_empty = -num_tokens % self._engine.format.block_size
            self._mover.save(RequestKey(1), pairs, _check, num_empty=num_empty)
        else:
            self._mover.load(RequestKey(1), pairs, _check)
        assert self._completions.run(timeout_s=60) == 1


def _check(outcome: Outcome) -> None:
    if outcome.error is not None:
        raise RuntimeError(outcome.error)


def perplexity(
    engine: Engine, tokenizer: Tokenizer, pool_kv_dtype: str, examples: Sequence[TaskExample]
) -> float:
    forced, nll, num_tokens = Forced(engine, pool_kv_dtype), 0.0, 0
    end = tokenizer.eos_token_id
    assert end is not None
    with progress(len(examples), "answers") as bar:
        bar.set_description(f"perplexity, {pool_kv_dtype}")
        for example in examples:
            prompt = tokenizer.chat_ids([{"role": "user", "content": example.prompt}])
            answer = [*tokenizer.encode(example.answer, False), end]
            nll += forced.nll(prompt, answer)
            num_tokens += len(answer)
            bar.update()
    forced.close()
    engine.check_idle()
    return math.exp(nll / num_tokens)


# ---- the page --------------------------------------------------------------------------------------------------------


def page(found: dict[str, Any], answers: dict[str, dict[str, Share]], agreed: Agreement, lost: float) -> str:
    plain, stored = (found["perplexity"][each] for each in POOL_KV_DTYPES)
    by_task = []
    for task in ("all", *TASKS):
        shares = [answers[each][task] for each in POOL_KV_DTYPES]
        by_task.append((task, shares[0].num_asked, *(f"{each.percent:.2f} %" for each in shares)))
    sizes = []
    for dtype in ("bfloat16", "float32"):
        for block_size in BLOCK_SIZES:
            form = BlockFormat(4, block_size, 2, 64, dtype)
            whole, part = form.block_bytes, form.in_pool("int8").block_bytes
            ratios = f"{part / whole:.3f}", f"{whole / part:.2f} x"
            sizes.append((dtype, block_size, f"{whole:,}", f"{part:,}", *ratios))
    head = ("KV in", "slots", "as instances have it", "int8", "share", "blocks in the same memory")
    parts = (
        heading("KV in 8 bits in the pool", found, f"KV in {found['dtype']}"),
        "This table has the shares of exact answers to held-out prompts. All KV goes through the pool. With int8, "
        f"the share changes by **{0.0 - lost:+.2f} points** (aim: {MOST_LOST} fewer at most).",
        table(("task", "prompts", "as instances have it", "int8"), by_task, 1),
        f"{agreed.num_same_answers} of {agreed.num_answers} answers are the same, token for token "
        f"({100 * agreed.num_same_answers / agreed.num_answers:.2f} %). "
        f"{agreed.num_same_tokens} of {agreed.num_tokens} tokens are the same at the same place "
        f"({100 * agreed.num_same_tokens / agreed.num_tokens:.2f} %).",
        f"The perplexity of {found['num_forced']} right answers is {plain:.6f}, and {stored:.6f} with int8 "
        f"({100 * (stored / plain - 1):+.4f} %). "
        "Each token follows the right ones, over the prompt's KV from the pool.",
        "A block of the demo model (4 layers, 2 KV heads of 64) has these bytes:",
        table(head, sizes, 1),
    )
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = parser_of(__doc__, out=PAGE_AND_JSON)
    parser.add_argument("--num-per-task", type=int, default=200)
    parser.add_argument("--num-forced", type=int, default=40, help="examples per task for perplexity")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    by_task = held_out(options.num_per_task, options.seed)
    examples = [example for each in by_task.values() for example in each]
    tokenizer = Tokenizer.from_directory(demo.MODEL_DIR)

    forced = [example for each in by_task.values() for example in each[: options.num_forced]]
    config = EngineConfig(
        str(demo.MODEL_DIR),
        dtype=options.dtype,
        max_model_len=MAX_MODEL_LEN,
        use_tqdm=False,
        max_num_batched_tokens=MAX_MODEL_LEN,
    )
    engine = build_engine(config).engine
    perplexities = {each: perplexity(engine, tokenizer, each, forced) for each in POOL_KV_DTYPES}

    said = {each: served_answers(each, options.dtype, examples) for each in POOL_KV_DTYPES}
    answers = {
        name: {task: share([a for a in each if a.example.task == task]) for task in TASKS}
        | {"all": share(each)}
        for name, each in said.items()
    }
    agreed = agreement(tokenizer, said["auto"], said["int8"])
    lost = answers["auto"]["all"].percent - answers["int8"]["all"].percent
    found = facts() | {
        "dtype": options.dtype,
        "num_forced": len(forced),
        "perplexity": perplexities,
        "answers": answers,
        "agreement": agreed,
        "points_lost": lost,
    }
    publish(options.out, page(found, answers, agreed, lost), found)
    return 0 if lost <= MOST_LOST else 1


if __name__ == "__main__":
    sys.exit(main())
