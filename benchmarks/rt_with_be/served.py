"""Runs `alignedserve serve` with the demo model on this machine, on its own port, during a measurement.

`Server` and `BestEffortLoad` are the measured interfaces. `Served` and its batch job implement them here, and `peer`
for vLLM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx2

from alignedserve.bench.client import RequestOutcome
from alignedserve.bench.workload import Item
from alignedserve.gateway.generation.service import TBT_HEADER, TTFT_HEADER
from alignedserve.launch.ports import free_port
from benchmarks.rt_with_be.arithmetic import Samples, parse_metrics, total
from benchmarks.rt_with_be.traffic import Job, ask

HOST = "127.0.0.1"
START_S, STOP_S = 120.0, 40.0
LOOK_S = 0.1
# Best-effort requests that run at once. As many again wait in the router.
NUM_SLOTS = 64
OPTIONS = (
    *("--device", "cpu", "--max-num-seqs", str(NUM_SLOTS), "--batch-max-num-lines", str(2 * NUM_SLOTS)),
    *("--length-predictor", "hash", "--shutdown-timeout", "1"),
    # The same prompts are sent alone and beside others.
    "--no-enable-prefix-caching",
)


@dataclass(frozen=True)
class Counters:
    """Counts since the server started."""

    rt_tokens: float
    be_tokens: float
    # Seconds of computing on decode instances.
    computing_s: float
    num_evicted: float

    def __sub__(self, before: Counters) -> Counters:
        return Counters(
            self.rt_tokens - before.rt_tokens,
            self.be_tokens - before.be_tokens,
            self.computing_s - before.computing_s,
            self.num_evicted - before.num_evicted,
        )


class BestEffort(Protocol):
    def counts(self) -> Mapping[str, int]:
        """Returns the numbers of lines: total, completed, failed."""
        ...

    def cancel(self) -> None: ...


class Server(Protocol):
    def counters(self) -> Counters: ...

    def ask(
        self, items: Sequence[Item], slo_s: tuple[float, float] | None
    ) -> tuple[list[RequestOutcome], float]:
        """Sends real-time requests. Returns their outcomes when all are answered, and the seconds it took."""
        ...

    def start(self, asked: Mapping[str, dict[str, Any]]) -> BestEffort:
        """Starts a job; one at a time."""
        ...


class Served:
    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx2.Client(base_url=url, timeout=60)

    def ask(
        self, items: Sequence[Item], slo_s: tuple[float, float] | None
    ) -> tuple[list[RequestOutcome], float]:
        ms = [f"{value * 1e3:g}" for value in slo_s or ()]
        return ask(self.url, items, dict(zip((TTFT_HEADER, TBT_HEADER), ms, strict=False)))

    def start(self, asked: Mapping[str, dict[str, Any]]) -> Job:
        return Job(self._http, asked)

    def counters(self) -> Counters:
        samples = self.metrics()
        is_colocated = any(("role", "colocated") in labels for _, labels in samples)
        role = "colocated" if is_colocated else "decode"
        return Counters(
            rt_tokens=total(samples, "generation_tokens_total", tier="rt"),
            be_tokens=total(samples, "generation_tokens_total", tier="be"),
            computing_s=total(samples, "computing_seconds_total", role=role),
            num_evicted=total(samples, "num_evictions_total", role=role),
        )

    def metrics(self) -> Samples:
        return parse_metrics(self._http.get("/metrics").raise_for_status().text)


@contextmanager
def serving(policy: str, *options: str, usual: Sequence[str] = OPTIONS) -> Iterator[Served]:
    port = free_port(HOST)
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="state-", dir="/tmp", ignore_cleanup_errors=True) as state:
        own = ["--policy", policy, "--host", HOST, "--port", str(port), "--state-dir", state]
        command = [sys.executable, "-m", "alignedserve", "serve", *own, *usual, *options]
        with running(command, Path(state) / "log", "ready after", START_S):
            yield Served(f"http://{HOST}:{port}")


@contextmanager
def running(
    command: Sequence[str],
    log: Path,
    ready: str,
    start_s: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Yields the process when it is ready, and stops it at the end. Its output goes to a file that errors quote."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=os.environ | dict(environment or {}),
            stdout=file,
            stderr=subprocess.STDOUT,
            # Stays in this session: Linux gives each session its share of the cores, and a client in another session
            # than its server waited 40 ms and more for a turn.
            process_group=0,
        )
    try:
        _until_ready(process, log, ready, start_s)
        yield process
    finally:
        _stop(process)


def _until_ready(process: subprocess.Popen[bytes], log: Path, ready: str, start_s: float) -> None:
    deadline = time.monotonic() + start_s
    while ready not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server does not get ready:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(LOOK_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stops the process and all that it has started."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        # Its group is its own, and includes whatever it has started.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_S)


def kv_options(kv_bytes: int, pool_bytes: int) -> Sequence[str]:
    return "--kv-cache-memory-bytes", str(kv_bytes), "--pool-memory-bytes", str(pool_bytes)
