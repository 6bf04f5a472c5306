"""Jobs as an API shows them: created once for an `Idempotency-Key`, found by their owner, listed, cancelled.

OpenAI's batches (routes.py) and Anthropic's message batches (anthropic/batches.py) are two faces of it.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Generic, TypeVar

import msgspec
from fastapi import Header, Request

from alignedserve.batch.job_run import cancel_job
from alignedserve.batch.runner import BatchRunner
from alignedserve.gateway.generation.endpoint import DirectAnswer
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_pieces import Json
from alignedserve.gateway.openai.batch_jobs.files import viewer
from alignedserve.store import JobId, JobRecord, Store, StoreFull, Tally, TooManyJobs
from alignedserve.store.records import new_job_id
from alignedserve.store.retry import repeated

# Jobs of a listing that are read at a time.
JOBS_AT_A_TIME = 250

# A client that repeats a creation with the same key gets the job that it created first.
IdempotencyKey = Annotated[str | None, Header(max_length=255)]

# What a call asks for.
Asked = TypeVar("Asked", bound=DirectAnswer)


@dataclass(frozen=True)
class JobApi(ABC, Generic[Asked]):
    store: Store
    runner: BatchRunner
    # Whether each API key sees the jobs of all keys.
    is_shared: bool

    # How an id begins, which ids are looked up, and the name of the path's parameter.
    id_prefix: ClassVar[str]
    ids: ClassVar[re.Pattern[str]]
    param: ClassVar[str]

    def viewer(self, http: Request) -> str | None:
        return viewer(http, self.is_shared)

    async def create(self, http: Request, asked: Asked, owner: str, idempotency_key: str | None) -> JobRecord:
        """Returns the job of this call, or of an earlier one with its key. Raises ApiError, StoreAway and StoreFull."""
        job_id = _job_id_of(owner, idempotency_key, self.id_prefix)
        if idempotency_key and (earlier := await self.store.job(job_id)):
            return self._repeated(earlier, asked, idempotency_key)
        new = await self._new_job(job_id, asked, owner, self.viewer(http))
        try:
            job = await self._added(new, idempotency_key)
        except BaseException:
            await self._drop(new)
            raise
        if idempotency_key:
            # A concurrent call may have been first.
            if job.input_file_id != new.input_file_id:
                await self._drop(new)
            self._repeated(job, asked, idempotency_key)
        self.runner.wake()
        return job

    async def find(self, http: Request, job_id: str) -> JobRecord:
        """Returns the job. Raises the same ApiError for a job that does not exist, for another owner's, and for an id
        that has another form."""
        job = await self.store.job(JobId(job_id)) if self.ids.fullmatch(job_id) else None
        if job is None or self.viewer(http) not in (None, job.owner):
            raise ApiError(404, f"{self.param}={job_id!r}: there is no such batch", param=self.param)
        return job

    async def cancel(self, job: JobRecord) -> JobRecord:
        job = await cancel_job(self.store, job)
        self._check_cancelled(job)
        self.runner.cancel(job.id)
        return job

    async def bodies_of(self, ids: Sequence[str]) -> list[Json]:
        bodies: list[Json] = []
        for start in range(0, len(ids), JOBS_AT_A_TIME):
            found = await self.store.jobs([JobId(each) for each in ids[start : start + JOBS_AT_A_TIME]])
            bodies += [self.body(job, tally) for job, tally in found]
        return bodies

    # ---- what an API does in its own way ----

    @abstractmethod
    def body(self, job: JobRecord, tally: Tally) -> Json: ...

    @abstractmethod
    def _is_same(self, job: JobRecord, asked: Asked) -> bool:
        """Whether the job is what the call asks for."""

    @abstractmethod
    async def _new_job(self, job_id: JobId, asked: Asked, owner: str, viewer: str | None) -> JobRecord:
        """Raises ApiError, StoreAway and StoreFull."""

    async def _drop(self, job: JobRecord) -> None:
        """Drops what `_new_job` has stored for a job that was not added after all."""

    @abstractmethod
    def _check_cancelled(self, job: JobRecord) -> None:
        """Raises ApiError for a job that can't be cancelled."""

    # ---- both ----

    def _repeated(self, job: JobRecord, asked: Asked, idempotency_key: str) -> JobRecord:
        """Returns the job. Raises ApiError if the same key was used to create a different one."""
        if not self._is_same(job, asked):
            raise ApiError(400, f"Idempotency-Key={idempotency_key!r}: another batch was created with it")
        return job

    async def _added(self, job: JobRecord, idempotency_key: str | None) -> JobRecord:
        """Adds the job, and returns the stored job with this id. Two calls may be concurrent with the same
        `Idempotency-Key`: the first one's job is stored. Raises ApiError and StoreAway."""
        try:
            is_added = await repeated(self.store.add_job, job)
        except TooManyJobs as error:
            raise ApiError(429, str(error), code="too_many_batches") from None
        except StoreFull as error:
            raise ApiError(413, str(error), code="storage_full") from None
        if not is_added:
            raise ApiError(400, f"input_file_id={job.input_file_id!r}: it is gone", param="input_file_id")
        stored = await repeated(self.store.job, job.id) if idempotency_key else None
        return stored or job


def _job_id_of(owner: str, idempotency_key: str | None, prefix: str) -> JobId:
    """Returns the id of a new job, which is the same for all calls of an owner with the same key."""
    if not idempotency_key:
        return new_job_id(prefix)
    named = msgspec.json.encode([owner, idempotency_key])
    return JobId(prefix + hashlib.sha256(named).hexdigest()[:24])
