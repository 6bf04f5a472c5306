"""The invariants of a store, checked from the calls made to it: a model that is independent of its implementation.

- Only the last gateway that took a job changes it, and no gateway changes a job that is over.
- A job is not taken from a gateway that renews its lease, or could.
- A gateway that has learned that its lease is lost stops work on the job.
- A line's first result stays, and is the one that is read. A line with a result does not begin again.
- A job is completed when each of its lines has a result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from alignedserve.sim.clock import Clock
from alignedserve.store import JobId, JobRecord, Lease, LeaseLost, LeaseState, LineResult
from alignedserve.vopr.failures import Broken
from alignedserve.vopr.front_end.quiet import FaultTimes
from alignedserve.vopr.front_end.store_link import StoreObserver

# Calls that only the holder of a lease may make.
_OF_HOLDERS = ("begin_lines", "put_result", "replace_job")
# Seconds within which a gateway must stop after it has learned that its lease is lost.
STOPS_S = 1.0
# Seconds for which a past fault may still have effects in a gateway.
RECOVERS_S = 10.0


class Ledger(StoreObserver):
    def __init__(self, clock: Clock, quiet: FaultTimes) -> None:
        # The accepted jobs in their current state.
        self.jobs: dict[str, JobRecord] = {}
        self.num_stored: Counter[str] = Counter()
        self._clock = clock
        self._quiet = quiet
        self._holders: dict[str, Lease] = {}
        # When each lease was last taken or renewed, and for how many seconds.
        self._renewed: dict[Lease, tuple[float, float]] = {}
        # When its holder learned that each lease was lost.
        self._lost_s: dict[Lease, float] = {}
        self._results: dict[tuple[str, int], LineResult] = {}

    @property
    def open_jobs(self) -> list[JobId]:
        return [job.id for job in self.jobs.values() if not job.is_over]

    def check_idle(self) -> None:
        """Raises Broken if an accepted job is not over."""
        if self.open_jobs:
            raise Broken(f"jobs were accepted and did not end ({self.open_jobs})")

    # ---- what processes know ----

    def asks(self, process: str, method: str, args: Sequence[Any]) -> None:
        lease = next((each for each in args if isinstance(each, Lease)), None)
        if method not in _OF_HOLDERS or lease is None:
            return
        lost_s = self._lost_s.get(lease)
        if lost_s is not None and self._clock.now - lost_s > STOPS_S:
            raise Broken(
                f"a gateway goes on with a job although it knows that it has lost it ({process}: {method})"
            )

    def hears(self, process: str, method: str, args: Sequence[Any], outcome: Any) -> None:
        lost: list[Lease] = []
        if method == "renew" and not isinstance(outcome, Exception):
            lost = [lease for lease, state in zip(args[0], outcome, strict=True) if state == "lost"]
        elif isinstance(outcome, LeaseLost):
            lost = [each for each in args if isinstance(each, Lease)]
        for lease in lost:
            self._lost_s.setdefault(lease, self._clock.now)

    # ---- calls executed by the store ----

    def made(self, process: str, method: str, args: Sequence[Any], result: Any) -> None:
        name = "_results_read" if method == "results" else f"_{method}"
        if check := getattr(self, name, None):
            check(result, *args)

    def _add_job(self, is_added: bool, job: JobRecord) -> None:
        if is_added:
            self.jobs.setdefault(job.id, job)

    def _take(self, leases: Sequence[Lease], stage: str, holder: str, seconds: float, *_: Any) -> None:
        for lease in leases:
            if before := self._holders.get(lease.id):
                self._check_lapsed(before)
            self._holders[lease.id] = lease
            self._renewed[lease] = self._clock.now, seconds

    def _check_lapsed(self, lease: Lease) -> None:
        renewed_s, seconds = self._renewed[lease]
        if self._quiet.was_between(renewed_s - RECOVERS_S, renewed_s + seconds):
            raise Broken(f"a job's lease was not renewed, although there was no fault ({lease})")

    def _renew(self, states: Sequence[LeaseState], leases: Sequence[Lease], seconds: float) -> None:
        for lease, state in zip(leases, states, strict=True):
            if state != "lost":
                self._renewed[lease] = self._clock.now, seconds

    def _release(self, _: None, lease: Lease) -> None:
        if self._holders.get(lease.id) == lease:
            del self._holders[lease.id]

    def _begin_lines(self, _: None, lease: Lease, lines: Sequence[int]) -> None:
        self._changes(lease)
        if again := [line for line in lines if (lease.id, line) in self._results]:
            raise Broken(f"lines that have their results begin again (job {lease.id}, lines {again})")

    def _put_result(self, _: None, lease: Lease, owner: str, line: int, result: LineResult, *__: Any) -> None:
        self._changes(lease)
        # A line may run twice. Its first result counts.
        if (lease.id, line) not in self._results:
            self._results[lease.id, line] = result
            self.num_stored[lease.id] += 1

    def _results_read(self, found: Sequence[LineResult | None], job_id: JobId, lines: Sequence[int]) -> None:
        for line, result in zip(lines, found, strict=False):
            if result is not None and result != self._results[job_id, line]:
                raise Broken(f"a line has a result other than its first (job {job_id}, line {line})")

    def _replace_job(
        self, is_done: bool, old: JobRecord, new: JobRecord, lease: Lease | None, *_: Any
    ) -> None:
        if is_done:
            if lease:
                self._changes(lease)
            self._replaced(old, new)

    def _changes(self, lease: Lease) -> None:
        job = self.jobs[lease.id]
        if self._holders.get(job.id) != lease or job.is_over:
            raise Broken(f"a job was changed by a gateway that has lost it ({job.status}; {lease})")

    def _replaced(self, old: JobRecord, new: JobRecord) -> None:
        if self.jobs[new.id] != old:
            raise Broken(
                f"a job is replaced from an old version ({old.status}; is {self.jobs[new.id].status})"
            )
        self.jobs[new.id] = new
        if new.status == "completed" and self.num_stored[new.id] != new.num_lines:
            raise Broken(
                f"a job is completed with {self.num_stored[new.id]} results of {new.num_lines} lines ({new.id})"
            )
        if new.is_over:
            # The store forgets its holder.
            self._holders.pop(new.id, None)
