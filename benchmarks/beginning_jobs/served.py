"""Jobs as `serve` answers them: a job of the batch API here, and all lines at once for a server without jobs."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.beginning_jobs.floor import Job
from benchmarks.prefix_caching import NAME, make_chat_model, ours, vllm
from benchmarks.rt_with_be import traffic

# Ordinary tokens of the demo model's vocabulary.
TOKENS = range(100, 380)
ENDPOINT = "/v1/completions"
TIMEOUT_S = 3600.0


def make_model(directory: Path) -> None:
    make_chat_model(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"max_position_embeddings": 16384}))


def bodies(job: Job) -> list[dict[str, Any]]:
    dice = random.Random(0)
    prefixes = [dice.choices(TOKENS, k=job.common) for _ in range(job.num_beginnings)]
    given = {"model": NAME, "temperature": 0, "max_tokens": job.out, "ignore_eos": True}
    return [
        given | {"prompt": prefixes[line % len(prefixes)] + dice.choices(TOKENS, k=job.own)}
        for line in range(job.num_lines)
    ]


def run(engine: str, python: str, model: Path, job: Job, root: Path, max_num_seqs: int) -> dict[str, Any]:
    """Returns the seconds until all lines were answered, and the number of their tokens."""
    asked = bodies(job)
    longest = job.common + job.own + job.out + 16
    options = ("--max-num-seqs", str(max_num_seqs), "--max-model-len", str(longest), "--dtype", "bfloat16")
    memory = ("--kv-cache-memory-bytes", str(3 << 30))
    if engine == "vllm":
        with vllm(python, model, *options, *memory) as url:
            return asyncio.run(_at_once(url, asked))
    with ours(model, *options, *memory, "--colocated-instances", "1", checkout=root) as url:
        return _as_job(url, asked)


async def _at_once(url: str, asked: Sequence[dict[str, Any]]) -> dict[str, float]:
    limits = httpx2.Limits(max_connections=len(asked))
    async with httpx2.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:

        async def tokens_of(body: dict[str, Any]) -> int:
            answer = await client.post(url.removesuffix("/v1") + ENDPOINT, json=body)
            return int(answer.raise_for_status().json()["usage"]["completion_tokens"])

        begun_s = time.perf_counter()
        counts = await asyncio.gather(*map(tokens_of, asked))
        return {"seconds": time.perf_counter() - begun_s, "num_tokens": sum(counts)}


def _as_job(url: str, asked: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the seconds from the upload of the file until the job was over, and the number of tokens."""
    with httpx2.Client(base_url=url.removesuffix("/v1"), timeout=TIMEOUT_S) as http:
        lines = {f"line-{number}": body for number, body in enumerate(asked)}
        begun_s = time.perf_counter()
        batch = traffic.Job(http, lines, endpoint=ENDPOINT).until_over(TIMEOUT_S)
        seconds = time.perf_counter() - begun_s
        if batch["status"] != "completed" or batch["error_file_id"]:
            raise RuntimeError(f"the job has not been answered entirely: {batch}")
        answers = (
            http.get(f"/v1/files/{batch['output_file_id']}/content").raise_for_status().text.splitlines()
        )
    counts = [json.loads(each)["response"]["body"]["usage"]["completion_tokens"] for each in answers]
    return {"seconds": seconds, "num_tokens": sum(counts)}
