"""Chats sent by guidellm, and its results."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignedserve.sim.report import quantiles
from benchmarks.rt_with_be.traffic import MAX_OUTPUT, MIN_OUTPUT, MODEL
from tests.clients.environments import shared_packages

# The ratio of burst to calm: 15 calls per second against one.
CALM = 15.0
# More than anything on a CPU answers per second. guidellm stops when its data ends.
MAX_CALLS_PER_S = 500.0
# Seconds that a run may take beyond its phases, because each phase starts its own processes.
SLACK_S = 120.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # It shares the cores with the server. With ten processes, its default, it would measure itself.
    "GUIDELLM__MAX_WORKER_PROCESSES": "1",
}


@dataclass(frozen=True)
class Chats:
    """guidellm's results for all answered calls in a run."""

    num_calls: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p99_ms: float
    calls_per_s: float
    # In all answers.
    num_tokens: int
    # Failed calls, and calls that were open when a phase ended. The times above don't include them.
    num_failed: int = 0
    num_open: int = 0


def questions(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Counting takes longer than any answer may be."""
    dice = random.Random(seed)
    firsts = [dice.randint(100, 900) for _ in range(count)]
    return [
        {
            "prompt": f"Count from {first} to {first + 20}.",
            "output_tokens_count": dice.randint(MIN_OUTPUT, MAX_OUTPUT),
        }
        for first in firsts
    ]


def bursts(rate: float, num_rounds: int) -> list[float]:
    return [rate / CALM, rate] * num_rounds


def ask_at(guidellm: Path, url: str, rates: Sequence[float], phase_s: float) -> Chats:
    """Sends calls at each rate for `phase_s` seconds, one rate after the other."""
    profile = {"kind": "constant", "rate": list(rates)}
    return _run(guidellm, url, profile, phase_s, len(rates), max(rates))


def ask_at_once(guidellm: Path, url: str, num_at_once: int, seconds: float) -> Chats:
    """Sends a new call as soon as one is answered."""
    profile = {"kind": "throughput", "max_concurrency": num_at_once}
    return _run(guidellm, url, profile, seconds, 1, MAX_CALLS_PER_S)


def _run(
    guidellm: Path, url: str, profile: dict[str, Any], phase_s: float, num_phases: int, max_rate: float
) -> Chats:
    """Each phase begins with the first question. Raises CalledProcessError with guidellm's output if guidellm fails."""
    with tempfile.TemporaryDirectory(prefix="guidellm-") as directory:
        data, report = Path(directory, "data.jsonl"), Path(directory, "report.json")
        data.write_text("\n".join(map(json.dumps, questions(math.ceil(max_rate * phase_s) + 1))))
        options = {
            "--backend": {"kind": "openai_http", "target": url, "model": MODEL},
            "--profile": profile,
            "--constraint": {"kind": "max_duration", "seconds": phase_s},
            "--data": {"kind": "json_file", "path": str(data)},
            "--output": {"kind": "json", "path": str(report)},
        }
        words = [word for name, value in options.items() for word in (name, json.dumps(value))]
        command = [str(guidellm), "run", *words, "--disable-console"]
        environment = os.environ | shared_packages() | ENVIRONMENT
        timeout_s = num_phases * (phase_s + SLACK_S)
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=timeout_s)
        return chats_of(json.loads(report.read_text()))


def chats_of(report: dict[str, Any]) -> Chats:
    """Raises RuntimeError if no chat was answered, since there is nothing to compare then."""
    parts = [part["requests"] for part in report["benchmarks"]]
    done, failed, left = (
        [call for part in parts for call in part.get(end) or ()]
        for end in ("successful", "errored", "incomplete")
    )
    if not done:
        raise RuntimeError(f"none of {len(failed) + len(left)} chats was answered: {failed[:1]}")
    ttft = quantiles([call["time_to_first_token_ms"] for call in done])
    gap = quantiles([call["inter_token_latency_ms"] for call in done])
    seconds = sum(part["duration"] for part in report["benchmarks"])
    num_tokens = sum(call["output_tokens"] for call in done)
    rate = len(done) / seconds
    return Chats(len(done), ttft.p50, ttft.p99, gap.p99, rate, num_tokens, len(failed), len(left))
