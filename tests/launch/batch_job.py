"""A batch job of questions to the demo model: submitted, waited for, and its answers compared with the engine's."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import httpx2
import openai

from alignedserve import LLM, SamplingParams, demo
from tests.launch.server import START_S, Server

MAX_TOKENS = 24
# Jobs of up to this number of lines, which ask the same, share what the engine says to them.
MOST_LINES = 200
ASK_S = 0.1


def questions(num_lines: int) -> dict[str, str]:
    return {f"line-{number}": f"Count from {number} to {number + 3}." for number in range(num_lines)}


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)


def submit(client: openai.OpenAI, num_lines: int) -> str:
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": _body(question)}
        for name, question in questions(num_lines).items()
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    return batch.id


def until(
    client: openai.OpenAI, batch_id: str, is_so: Callable[[openai.types.Batch], object]
) -> openai.types.Batch:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            batch = client.batches.retrieve(batch_id)
        except (openai.APIConnectionError, openai.InternalServerError):
            # the gateway, or redis, is being started again
            batch = None
        if batch and is_so(batch):
            return batch
        time.sleep(ASK_S)
    cluster = httpx2.get(f"{client.base_url}cluster", timeout=START_S).text
    raise AssertionError(f"the batch does not get so far: {batch}\n{cluster}")


def num_completed(batch: openai.types.Batch) -> int:
    return batch.request_counts.completed if batch.request_counts else 0


def check_answers(client: openai.OpenAI, batch_id: str, num_lines: int) -> None:
    """When it is over: every line was answered, as the engine alone answers it, and once."""
    batch = until(client, batch_id, lambda each: each.completed_at or each.failed_at or each.expired_at)
    assert batch.status == "completed" and num_completed(batch) == num_lines
    assert batch.error_file_id is None
    text = client.files.content(str(batch.output_file_id)).text
    lines = [json.loads(line) for line in text.splitlines()]
    times = Counter(line["custom_id"] for line in lines)
    assert times == dict.fromkeys(questions(num_lines), 1)
    assert {line["custom_id"]: _answer(line) for line in lines} == engine_alone(num_lines)


def engine_alone(num_lines: int) -> Mapping[str, str]:
    answers = _answers_of_the_engine(max(num_lines, MOST_LINES))
    return {name: answers[name] for name in questions(num_lines)}


@cache
def _answers_of_the_engine(num_lines: int) -> Mapping[str, str]:
    llm = LLM(str(demo.MODEL_DIR), dtype="float32", use_tqdm=False)
    asked = questions(num_lines)
    chats = [[{"role": "user", "content": question}] for question in asked.values()]
    results = llm.chat(chats, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
    return dict(zip(asked, (result.outputs[0].text for result in results), strict=True))


def _body(question: str) -> dict[str, object]:
    messages = [{"role": "user", "content": question}]
    return {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}


def _answer(line: Mapping[str, Any]) -> str:
    response = line["response"]
    assert response["status_code"] == 200
    return str(response["body"]["choices"][0]["message"]["content"])
