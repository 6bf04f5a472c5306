"""A batch on the whole system, real, while its processes are killed: every line is answered, rightly, and once."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections import Counter

import openai

from alignedserve import LLM, SamplingParams, demo
from tests.launch.server import START_S, Server, serving

NUM_LINES = 500
NUM_KILLS = 10
VICTIMS = ("redis", "gateway", "router")
MAX_TOKENS = 24
# at any moment of a line's way: before it is taken, while it runs, while its answer is stored
MAX_PAUSE_S = 1.0

QUESTIONS = {f"line-{number}": f"Count from {number} to {number + 3}." for number in range(NUM_LINES)}


def test_a_batch_survives_ten_kills_with_every_answer_once() -> None:
    rng = random.Random(7)
    with serving("--dtype", "float32", "--batch-max-num-lines", "32") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
        batch_id = submit(client)
        killed = [kill(server, VICTIMS[number % 3], rng) for number in range(NUM_KILLS)]
        assert len(killed) == NUM_KILLS
        batch = until_over(client, batch_id)
        assert batch.status == "completed"
        assert batch.request_counts and batch.request_counts.completed == NUM_LINES
        assert batch.error_file_id is None
        lines = [
            json.loads(line) for line in client.files.content(str(batch.output_file_id)).text.splitlines()
        ]
        server.until_whole()
    times = Counter(line["custom_id"] for line in lines)
    assert times == dict.fromkeys(QUESTIONS, 1)
    answers = {line["custom_id"]: answer_of(line) for line in lines}
    assert answers == engine_alone()


def submit(client: openai.OpenAI) -> str:
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body(question)}
        for name, question in QUESTIONS.items()
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    return batch.id


def body(question: str) -> dict[str, object]:
    messages = [{"role": "user", "content": question}]
    return {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}


def answer_of(line: dict[str, object]) -> str:
    response = line["response"]
    assert isinstance(response, dict) and response["status_code"] == 200
    return str(response["body"]["choices"][0]["message"]["content"])


def engine_alone() -> dict[str, str]:
    llm = LLM(str(demo.MODEL_DIR), dtype="float32", use_tqdm=False)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS.values()]
    results = llm.chat(chats, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
    texts = [result.outputs[0].text for result in results]
    return dict(zip(QUESTIONS, texts, strict=True))


def kill(server: Server, victim: str, rng: random.Random) -> int:
    time.sleep(rng.uniform(0, MAX_PAUSE_S))
    pid = until_pid(server, victim)
    os.kill(pid, signal.SIGKILL)
    return pid


def until_pid(server: Server, victim: str) -> int:
    """Of whoever is it now: not of one that was killed."""
    deadline = time.monotonic() + START_S
    while True:
        pid = redis_pid(server) if victim == "redis" else process_pid(server, victim)
        if pid is not None and os.path.exists(f"/proc/{pid}"):
            return pid
        assert time.monotonic() < deadline, server.output
        time.sleep(0.05)


def redis_pid(server: Server) -> int | None:
    said = re.findall(r"^redis is up after .* pid (\d+)$", server.output, re.MULTILINE)
    return int(said[-1]) if said else None


def process_pid(server: Server, role: str) -> int | None:
    try:
        processes = server.processes()
    except Exception:
        # the gateway is being started again
        return None
    return next((each["pid"] for each in processes if each["role"] == role and each["state"] == "up"), None)


def until_over(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            batch = client.batches.retrieve(batch_id)
        except (openai.APIConnectionError, openai.InternalServerError):
            # the gateway, or redis, is being started again
            time.sleep(0.2)
            continue
        if batch.completed_at or batch.failed_at or batch.expired_at:
            return batch
        time.sleep(0.2)
    raise AssertionError("the batch does not end")
