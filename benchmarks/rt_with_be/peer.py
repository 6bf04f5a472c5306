"""vLLM for CPU with the demo model, under the same load.

It has no batch API, so best effort is a client that keeps as many lines open as our router takes from a job. It has no
objectives either: chats precede lines by `priority`, or not at all. Its output is read from its /metrics; chats'
tokens, as counted by their clients, are subtracted to get BE's. It does not report its computing time, so a request
that is open counts as computing.

Its cores are divided as by default: with two, one computes, and the other schedules and answers. With both computing
(VLLM_CPU_OMP_THREADS_BIND=0-1, which it takes from the environment) it reached about half of the throughput, and with
nobind a third.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from alignedserve.bench.client import Client, RequestOutcome
from alignedserve.bench.workload import Item
from alignedserve.demo import MODEL_DIR
from alignedserve.launch.ports import free_port
from benchmarks.rt_with_be.arithmetic import parse_metrics, total
from benchmarks.rt_with_be.served import HOST, NUM_SLOTS, Counters, running
from benchmarks.rt_with_be.traffic import MODEL, ask

# our name -> its scheduling policy.
POLICIES = {"vllm": "fcfs", "vllm-priority": "priority"}
# One instance does both.
PLACE = "1"
# Chats have its default, 0, which goes first.
LINE_PRIORITY = 10
# It compiles at the start.
START_S = 600.0
STOP_S = 20.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # No downloads and no reports.
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}


def command(python: Path, scheduling: str, port: int) -> list[str]:
    return [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--host", HOST, "--port", str(port)),
        *("--model", str(MODEL_DIR), "--served-model-name", MODEL, "--max-model-len", "2048"),
        *("--max-num-seqs", str(NUM_SLOTS), "--scheduling-policy", scheduling),
        *("--disable-uvicorn-access-log", "--no-enable-prefix-caching"),
    ]


@contextmanager
def serving(python: Path, scheduling: str) -> Iterator[Peer]:
    port = free_port(HOST)
    with tempfile.TemporaryDirectory(prefix="peer-", dir="/tmp", ignore_cleanup_errors=True) as state:
        log = Path(state) / "log"
        options = command(python, scheduling, port)
        with running(options, log, "Application startup complete", START_S, ENVIRONMENT):
            peer = Peer(f"http://{HOST}:{port}", scheduling, Path(state))
            try:
                yield peer
            finally:
                peer.close()


class Peer:
    def __init__(self, url: str, scheduling: str, state: Path) -> None:
        self.url = url
        self._http = httpx2.Client(base_url=url, timeout=60)
        self._has_priorities = scheduling == "priority"
        self._state = state
        self._jobs: list[KeptOpen] = []
        self._rt_tokens = 0
        # Seconds with a chat open and no job.
        self._rt_alone_s = 0.0

    def ask(
        self, items: Sequence[Item], slo_s: tuple[float, float] | None
    ) -> tuple[list[RequestOutcome], float]:
        outcomes, took_s = ask(self.url, items, {}, TokenCounting)
        self._rt_tokens += sum(outcome.output_len for outcome in outcomes)
        if not any(job.is_open for job in self._jobs):
            self._rt_alone_s += covered_s([(each.start_s, max(each.times_s, default=0)) for each in outcomes])
        return outcomes, took_s

    def start(self, asked: Mapping[str, dict[str, Any]]) -> KeptOpen:
        own = {"priority": LINE_PRIORITY} if self._has_priorities else {}
        self._jobs.append(KeptOpen(self.url, {name: body | own for name, body in asked.items()}, self._state))
        return self._jobs[-1]

    def counters(self) -> Counters:
        samples = parse_metrics(self._http.get("/metrics").raise_for_status().text)
        return Counters(
            rt_tokens=self._rt_tokens,
            be_tokens=total(samples, "vllm:generation_tokens_total") - self._rt_tokens,
            computing_s=self._rt_alone_s + sum(job.open_s for job in self._jobs),
            num_evicted=total(samples, "vllm:num_preemptions_total"),
        )

    def close(self) -> None:
        for job in self._jobs:
            job.cancel()


class TokenCounting(Client):
    """Counts tokens: vLLM combines several tokens into a piece when it can't send them as fast as it produces them."""

    def _body(self, item: Item) -> dict[str, Any]:
        body = super()._body(item)
        return body | {"stream_options": body["stream_options"] | {"continuous_usage_stats": True}}

    def _take(self, event: bytes, outcome: RequestOutcome) -> str | None:
        num_seen = len(outcome.times_s)
        error = super()._take(event, outcome)
        if len(outcome.times_s) > num_seen:
            outcome.times_s += [outcome.times_s[-1]] * (outcome.output_len - len(outcome.times_s))
        return error


class KeptOpen:
    """Keeps twice as many lines open as run at once, as for our jobs, until there are no more."""

    def __init__(self, url: str, asked: Mapping[str, dict[str, Any]], state: Path) -> None:
        self._num_lines = len(asked)
        self._answered = state / "answered"
        (state / "asked").write_text(json.dumps(asked))
        program = [sys.executable, "-m", "benchmarks.rt_with_be.keep_open", url, str(2 * NUM_SLOTS)]
        with (state / "asked").open("rb") as into, self._answered.open("wb") as out:
            self._process = subprocess.Popen(program, stdin=into, stdout=out)
        self._begun_s = time.monotonic()
        self._ended_s: float | None = None

    @property
    def is_open(self) -> bool:
        return self._ended_s is None

    @property
    def open_s(self) -> float:
        return (self._ended_s or time.monotonic()) - self._begun_s

    def counts(self) -> dict[str, int]:
        counts = counted(self._answered.read_text(), self._num_lines)
        if counts["completed"] < self._num_lines and self._process.poll() is not None:
            raise RuntimeError(f"the job's client ended with {self._process.returncode} after {counts}")
        return counts

    def cancel(self) -> None:
        """Ends the job's client. Safe to repeat."""
        self._ended_s = self._ended_s or time.monotonic()
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)


def counted(answered: str, num_lines: int) -> dict[str, int]:
    """Returns the counts of lines. Raises RuntimeError for a line that was not answered."""
    # The text after the last newline is still being written.
    lines = [json.loads(line) for line in answered.split("\n")[:-1]]
    for line in lines:
        if "error" in line:
            raise RuntimeError(f"{line['line']}: {line['error']}")
    return {"total": num_lines, "completed": len(lines), "failed": 0}


def covered_s(spans_s: Sequence[tuple[float, float]]) -> float:
    """Returns the seconds that lie in at least one span."""
    covered, until_s = 0.0, float("-inf")
    for begin_s, end_s in sorted(spans_s):
        covered += max(end_s - max(begin_s, until_s), 0.0)
        until_s = max(until_s, end_s)
    return covered
