"""Which answers a client waits for. Checks that a request for any other answer is aborted soon, and that a line runs
only after the store has recorded that it began.

A request is identified by its seed, which is that of its question.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from alignedserve.protocol.messages import Submit
from alignedserve.router.events import Event, Received, Send
from alignedserve.router.requests import RequestState
from alignedserve.sim.clock import Clock
from alignedserve.store import FileId, JobId, JobRecord, Lease
from alignedserve.vopr.failures import Broken
from alignedserve.vopr.front_end.quiet import FaultTimes
from alignedserve.vopr.front_end.store_link import StoreObserver

# Seconds within which a request without a waiting client must be aborted, if there are no faults.
ABORTED_S = 10.0


class AwaitedAnswers:
    def __init__(self, clock: Clock, quiet: FaultTimes) -> None:
        self._clock = clock
        self._quiet = quiet
        # How many clients wait for the answer to a question, and since when none does.
        self._num_waiting: Counter[int] = Counter()
        self._unwanted_s: dict[int, float] = {}

    def want(self, seed: int) -> None:
        self._num_waiting[seed] += 1

    def unwant(self, seed: int) -> None:
        self._num_waiting[seed] -= 1
        self._unwanted_s[seed] = self._clock.now

    def check(self, requests: Iterable[RequestState]) -> None:
        """Checks the requests of a router."""
        for state in requests:
            seed = state.request.seed
            if state.is_finished or self._num_waiting[seed]:
                continue
            since_s = self._unwanted_s.get(seed, 0.0)
            is_late = self._clock.now - since_s > ABORTED_S
            if is_late and self._quiet.lasts(ABORTED_S):
                raise Broken(f"a request goes on that no client waits for, since {since_s} s (seed {seed})")


class Lines(StoreObserver):
    """The lines of batch jobs."""

    def __init__(self, wanted: AwaitedAnswers) -> None:
        self._wanted = wanted
        self._chunks: defaultdict[FileId, dict[int, bytes]] = defaultdict(dict)
        # The seeds of each job's lines, of all lines, and of those that have begun.
        self._seeds: dict[str, list[int]] = {}
        self._all: set[int] = set()
        self._begun: set[int] = set()
        self._is_running: set[JobId] = set()

    def made(self, process: str, method: str, args: Sequence[Any], result: Any) -> None:
        match method:
            case "put_chunk":
                self._chunks[args[0]][args[2]] = args[3]
            case "add_job" if result and args[0].id not in self._seeds:
                self._added(args[0])
            case "begin_lines":
                lease: Lease = args[0]
                self._begun |= {self._seeds[lease.id][number - 1] for number in args[1]}
            case "replace_job" if result:
                self._replaced(args[1])

    def __call__(self, now: float, event: Event, sends: list[Send]) -> None:
        match event:
            case Received(message=Submit(request=request)):
                if request.seed in self._all - self._begun:
                    raise Broken(
                        f"a line runs before the store knows that it has begun (seed {request.seed})"
                    )

    def _added(self, job: JobRecord) -> None:
        chunks = self._chunks[job.input_file_id]
        text = b"".join(chunks[number] for number in sorted(chunks))
        seeds = self._seeds[job.id] = [json.loads(line)["body"]["seed"] for line in text.splitlines()]
        self._all.update(seeds)
        self._is_running.add(job.id)
        for seed in seeds:
            self._wanted.want(seed)

    def _replaced(self, job: JobRecord) -> None:
        if job.id in self._is_running and job.status not in ("validating", "in_progress"):
            self._is_running.discard(job.id)
            for seed in self._seeds[job.id]:
                self._wanted.unwant(seed)
