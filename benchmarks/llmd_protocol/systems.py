"""The measured systems: this server with a policy, or vLLM. Both take lines, and report how many tokens they
produced."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx2

from benchmarks.rt_with_be import peer, served
from benchmarks.rt_with_be.traffic import OVER, Job

VLLM = "vllm-priority"
# KV for more requests than may run and wait.
KV = served.kv_options(512 << 20, 1 << 30)
LOOK_S = 1.0
# A job's window, as this server's API takes it.
WINDOWS = {"30m": 1800.0, "2h": 7200.0, "24h": 86400.0}


@dataclass(frozen=True)
class Done:
    """One job's result."""

    window: str
    # Seconds since it was created; None: not finished.
    took_s: float | None
    num_lines: int
    num_answered: int

    @property
    def is_in_time(self) -> bool:
        return self.took_s is not None and self.took_s <= WINDOWS[self.window]


class System(Protocol):
    url: str

    def start(self, lines: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """`lines`: the lines of each window's job."""
        ...

    # Whether `num_tokens` also counts the chats' tokens.
    counts_chats: bool

    def num_tokens(self) -> float:
        """Returns the tokens produced for lines since the server started."""
        ...

    def num_left(self) -> int:
        """Returns the number of lines without an answer."""
        ...

    def wait(self, timeout_s: float) -> list[Done]:
        """Waits until all jobs have finished or used up their time, and stops the rest."""
        ...


class Ours:
    counts_chats = False

    def __init__(self, at: served.Served) -> None:
        self.url = at.url
        self._at = at
        self._http = httpx2.Client(base_url=at.url, timeout=60)
        self._jobs: dict[str, Job] = {}

    def start(self, lines: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        self._jobs = {
            window: Job(self._http, {f"line-{n}": dict(line) for n, line in enumerate(each)}, window)
            for window, each in lines.items()
        }

    def num_tokens(self) -> float:
        return self._at.counters().be_tokens

    def num_left(self) -> int:
        counts = [job.counts() for job in self._jobs.values()]
        return sum(each["total"] - each["completed"] - each["failed"] for each in counts)

    def wait(self, timeout_s: float) -> list[Done]:
        deadline = time.monotonic() + timeout_s
        batches = {}
        for window, job in self._jobs.items():
            while (batch := job.look())["status"] not in OVER and time.monotonic() < deadline:
                time.sleep(LOOK_S)
            if batch["status"] not in OVER:
                job.cancel()
            batches[window] = batch
        return [done_of(window, batch) for window, batch in batches.items()]


def done_of(window: str, batch: Mapping[str, Any]) -> Done:
    counts, is_done = batch["request_counts"], batch["status"] == "completed"
    took_s = float(batch["completed_at"] - batch["created_at"]) if is_done else None
    return Done(window, took_s, counts["total"], counts["completed"])


class Peer:
    """Lines with shorter windows come first. It has no jobs, so nothing in it knows about windows."""

    counts_chats = True

    def __init__(self, at: peer.Peer) -> None:
        self.url = at.url
        self._at = at
        self._open: peer.KeptOpen | None = None
        self._sizes: dict[str, int] = {}
        self._begun_s = 0.0

    def start(self, lines: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        self._sizes = {window: len(each) for window, each in lines.items()}
        ordered = [line for each in lines.values() for line in each]
        self._begun_s = time.monotonic()
        self._open = self._at.start({f"line-{n}": dict(line) for n, line in enumerate(ordered)})

    def num_tokens(self) -> float:
        return self._at.counters().be_tokens

    def num_left(self) -> int:
        assert self._open
        counts = self._open.counts()
        return counts["total"] - counts["completed"]

    def wait(self, timeout_s: float) -> list[Done]:
        assert self._open
        took_s: dict[str, float] = {}
        deadline, ends = time.monotonic() + timeout_s, ends_of(self._sizes)
        while len(took_s) < len(ends) and time.monotonic() < deadline:
            num_done = self._open.counts()["completed"]
            now_s = time.monotonic() - self._begun_s
            took_s |= {w: now_s for w, end in ends.items() if num_done >= end and w not in took_s}
            time.sleep(LOOK_S)
        num_done = self._open.counts()["completed"]
        self._open.cancel()
        return [
            Done(window, took_s.get(window), size, min(max(num_done - (ends[window] - size), 0), size))
            for window, size in self._sizes.items()
        ]


def ends_of(sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns how many lines are done when each job is done, if lines are done in order."""
    ends, total = {}, 0
    for window, size in sizes.items():
        ends[window] = total = total + size
    return ends


def opener(name: str, vllm: Path | None, options: Sequence[str]) -> Callable[[], Any]:
    """Returns a function that opens the system with this name as a context manager."""

    @contextmanager
    def ours() -> Iterator[System]:
        with served.serving(name, *KV, *options) as at:
            yield Ours(at)

    @contextmanager
    def vllms() -> Iterator[System]:
        assert vllm
        with peer.serving(vllm, peer.POLICIES[VLLM]) as at:
            yield Peer(at)

    return vllms if name == VLLM else ours
