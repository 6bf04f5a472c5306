"""Sixteen streams at once, greedy and seeded in turn, and what the engine alone says to the same questions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import openai

from alignedserve import LLM, SamplingParams, demo

QUESTIONS = [f"Count from {first} to {first + 20}." for first in range(1, 17)]
# long enough for much to happen meanwhile
SETTINGS = [
    {"temperature": number % 2 * 0.7, "ignore_eos": True, "skip_special_tokens": False, "max_tokens": 300}
    for number in range(len(QUESTIONS))
]


@cache
def engine_alone(
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    model: Path = demo.MODEL_DIR,
    lora_modules: tuple[str, ...] = (),
    models: tuple[str, ...] = ("demo",),
) -> list[str]:
    """`models`: of the calls, in turn."""
    llm = LLM(
        str(model),
        dtype="float32",
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        lora_modules=lora_modules,
        use_tqdm=False,
    )
    params = [SamplingParams(**each, seed=7) for each in SETTINGS]  # type: ignore[arg-type]
    tokenizer = llm.get_tokenizer()
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [{"prompt_token_ids": tokenizer.chat_ids(chat)} for chat in chats]
    asked = [models[number % len(models)] for number in range(len(prompts))]
    adapters = [None if name == "demo" else name for name in asked]
    results = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    return [result.outputs[0].text for result in results]


def ask_all(
    url: str,
    in_the_middle: Callable[[], object] = lambda: None,
    models: tuple[str, ...] = ("demo",),
    questions: Sequence[str] = QUESTIONS,
    **more: Any,
) -> tuple[list[str], float]:
    """What all streams say, and the longest silence. `in_the_middle` of all of them something is done. Calls are for
    these models in turn, and have `more` fields. There may be fewer `questions` than usual."""
    return asyncio.run(_ask_all(url, in_the_middle, models, questions, more))


async def _ask_all(
    url: str,
    in_the_middle: Callable[[], object],
    models: tuple[str, ...],
    questions: Sequence[str],
    more: dict[str, Any],
) -> tuple[list[str], float]:
    started = [asyncio.Event() for _ in questions]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        asking = [
            asyncio.create_task(_ask(client, models[number % len(models)], question, settings | more, event))
            for number, (question, settings, event) in enumerate(
                zip(questions, SETTINGS[: len(questions)], started, strict=True)
            )
        ]
        await asyncio.gather(*(event.wait() for event in started))
        await asyncio.to_thread(in_the_middle)
        answers = await asyncio.gather(*asking)
    return [text for text, _ in answers], max(silence for _, silence in answers)


async def _ask(
    client: openai.AsyncOpenAI, model: str, question: str, settings: dict[str, Any], started: asyncio.Event
) -> tuple[str, float]:
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        stream=True,
        seed=7,
        timeout=170,
        extra_body=settings,
    )
    pieces: list[str] = []
    last, silence = time.monotonic(), 0.0
    async for chunk in stream:
        now = time.monotonic()
        last, silence = now, max(silence, now - last)
        pieces.append(chunk.choices[0].delta.content or "")
        if len(pieces) == 5:
            started.set()
    return "".join(pieces), silence
