"""What must be true of a store, found from the calls that were made at it: a model that knows nothing of its insides.

- Only the last one that took a job changes it, and nobody changes a job that is over.
- A line's first result stays, and is the one that is read.
- A job is completed when each of its lines has a result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from alignedserve.store import JobId, JobRecord, Lease, LineResult


class Ledger:
    def __init__(self) -> None:
        # The jobs that were accepted, as they are by now.
        self.jobs: dict[JobId, JobRecord] = {}
        self.num_stored: Counter[JobId] = Counter()
        # Results for lines that had one: their lines ran twice.
        self.num_ignored = 0
        self.num_taken = 0
        self._holders: dict[JobId, str] = {}
        self._results: dict[tuple[JobId, int], LineResult] = {}

    def observe(self, method: str, args: Sequence[Any], result: Any) -> None:
        name = "_results_read" if method == "results" else f"_{method}"
        if check := getattr(self, name, None):
            check(result, *args)

    def check_idle(self) -> None:
        """Every job that was accepted is over."""
        open_jobs = [job.id for job in self.jobs.values() if not job.is_over]
        if open_jobs:
            raise RuntimeError(f"these jobs were accepted and never end: {open_jobs}")

    def _add_job(self, is_added: bool, job: JobRecord) -> None:
        if is_added:
            self.jobs.setdefault(job.id, job)

    def _take(self, leases: Sequence[Lease], *_: Any) -> None:
        for lease in leases:
            self._holders[lease.job_id] = lease.token
            self.num_taken += 1

    def _release(self, _: None, lease: Lease) -> None:
        if self._holders.get(lease.job_id) == lease.token:
            del self._holders[lease.job_id]

    def _begin_lines(self, _: None, lease: Lease, lines: Sequence[int]) -> None:
        self._changes(lease)

    def _put_result(self, _: None, lease: Lease, owner: str, line: int, result: LineResult, *__: Any) -> None:
        self._changes(lease)
        if (lease.job_id, line) in self._results:
            self.num_ignored += 1
            return
        self._results[lease.job_id, line] = result
        self.num_stored[lease.job_id] += 1

    def _results_read(self, found: Sequence[LineResult | None], job_id: JobId, lines: Sequence[int]) -> None:
        for line, result in zip(lines, found, strict=False):
            if result is not None and result != self._results[job_id, line]:
                raise RuntimeError(f"job {job_id}: line {line} has another result than the first")

    def _replace_job(self, is_done: bool, old: JobRecord, new: JobRecord, lease: Lease | None) -> None:
        if lease:
            self._changes(lease)
        if is_done:
            self._replaced(old, new)

    def _finish_job(self, is_done: bool, old: JobRecord, new: JobRecord, lease: Lease, *_: Any) -> None:
        self._replace_job(is_done, old, new, lease)

    def _changes(self, lease: Lease) -> None:
        job = self.jobs[lease.job_id]
        if self._holders.get(job.id) != lease.token or job.is_over:
            raise RuntimeError(f"job {job.id} ({job.status}) was changed by {lease.token}, which has lost it")

    def _replaced(self, old: JobRecord, new: JobRecord) -> None:
        if self.jobs[new.id] != old:
            raise RuntimeError(
                f"job {new.id} is replaced as {old.status}, but it is {self.jobs[new.id].status}"
            )
        self.jobs[new.id] = new
        if new.status == "completed" and self.num_stored[new.id] != new.num_lines:
            raise RuntimeError(
                f"job {new.id} is completed with {self.num_stored[new.id]} results of {new.num_lines} lines"
            )
