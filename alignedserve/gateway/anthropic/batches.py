"""`/v1/messages/batches`, as in Anthropic's API. Its batches are jobs like OpenAI's, with two differences: the server
makes the input file, and results are in Anthropic's form."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from alignedserve.batch.runner import BatchRunner
from alignedserve.gateway.anthropic.batch_bodies import MESSAGE_BATCHES, MessageBatchBody, PreparedBatch
from alignedserve.gateway.generation.responding import RequestBuilder
from alignedserve.gateway.http.access import share_of
from alignedserve.gateway.http.description import request_body
from alignedserve.gateway.http.errors import ANTHROPIC_PATH, ApiError
from alignedserve.gateway.http.json_pieces import AnswerStream, Json
from alignedserve.gateway.http.keys import owner_of
from alignedserve.gateway.http.reading import json_body
from alignedserve.gateway.openai.batch_jobs.files import Upload, content_of, list_response
from alignedserve.gateway.openai.batch_jobs.job_api import IdempotencyKey, JobApi
from alignedserve.store import Contents, FileRecord, JobId, JobRecord, Listing, Store, StoreAway, Tally
from alignedserve.store.contents import CHUNK_BYTES
from alignedserve.store.records import MESSAGE_BATCH, Order

_PATH = MESSAGE_BATCHES.path
# Seconds that a batch may run, and the least time that its input file is kept.
WINDOW_S: Final = 86400
# seconds that results are kept
KEPT_S: Final = 29 * 86400


@dataclass(frozen=True)
class MessageBatchApi(JobApi[PreparedBatch]):
    contents: Contents
    max_file_bytes: int

    id_prefix = MESSAGE_BATCH
    ids = re.compile(MESSAGE_BATCH + "[0-9a-f]{24}")
    param = "message_batch_id"

    def body(self, job: JobRecord, tally: Tally) -> Json:
        return batch_body(job, tally)

    async def body_of(self, job: JobRecord) -> Json:
        return batch_body(job, await self.store.tally(job.id) if job.is_over else Tally())

    def _is_same(self, job: JobRecord, asked: PreparedBatch) -> bool:
        return (job.model, job.num_lines) == (asked.model, asked.num_lines)

    def _check_cancelled(self, job: JobRecord) -> None:
        if job.is_over and job.status != "cancelled":
            raise ApiError(400, f"message_batch_id={job.id!r}: it has ended, and can't be cancelled")

    async def _new_job(
        self, job_id: JobId, asked: PreparedBatch, owner: str, viewer: str | None
    ) -> JobRecord:
        """Returns a job that is in progress, since its file was checked already."""
        async with Upload(self.store, self.contents, owner, self.max_file_bytes) as upload:
            file = await _stored(upload, job_id, asked.body)
        now = int(time.time())
        return JobRecord(
            id=job_id,
            endpoint=ANTHROPIC_PATH,
            input_file_id=file.id,
            completion_window=f"{WINDOW_S // 3600}h",
            created_at=now,
            expires_at=now + WINDOW_S,
            owner=file.owner,
            status="in_progress",
            in_progress_at=now,
            model=asked.model,
            num_lines=asked.num_lines,
            output_expires_after_s=KEPT_S,
        )

    async def _drop(self, job: JobRecord) -> None:
        """Deletes the file, unless the batch was created after all."""
        with suppress(StoreAway):
            await self.contents.delete(job.input_file_id)

    async def delete(self, job: JobRecord) -> None:
        if not job.is_over:
            raise ApiError(400, f"message_batch_id={job.id!r}: it has not ended; cancel it first")
        for file_id in (job.input_file_id, job.output_file_id, job.error_file_id):
            if file_id is not None:
                await self.contents.delete(file_id)
        await self.store.delete_job(job)


def message_batch_routes(
    store: Store,
    contents: Contents,
    runner: BatchRunner,
    request_builder: RequestBuilder,
    max_file_bytes: int,
    is_shared: bool = False,
) -> APIRouter:
    routes = APIRouter()
    batches = MessageBatchApi(store, runner, is_shared, contents, max_file_bytes)

    @routes.post(_PATH, openapi_extra=request_body(MessageBatchBody))
    async def create(http: Request, answer: Response, idempotency_key: IdempotencyKey = None) -> Json:
        owner = owner_of(http)
        asked = await request_builder.preparer.answer(MESSAGE_BATCHES, await json_body(http), owner)
        assert isinstance(asked, PreparedBatch)
        share_of(http).add(len(asked.body))
        answer.headers.update(request_builder.ignored_parameters.note(asked.ignored))
        return await batches.body_of(await batches.create(http, asked, owner, idempotency_key))

    @routes.get(_PATH)
    async def list_batches(
        http: Request,
        before_id: str | None = None,
        after_id: str | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    ) -> Response:
        if before_id is not None and after_id is not None:
            raise ApiError(400, "before_id: not together with after_id", param="before_id")
        beside = after_id if before_id is None else before_id
        order: Order = "desc" if before_id is None else "asc"
        page = await store.page(Listing("jobs:messages", batches.viewer(http), beside, limit, order))
        if page is None:
            name = "after_id" if before_id is None else "before_id"
            raise ApiError(400, f"{name}={beside!r}: there is no such batch", param=name)
        ids = page.ids if before_id is None else page.ids[::-1]
        return list_response(await batches.bodies_of(ids), page.has_more)

    @routes.get(_PATH + "/{message_batch_id}")
    async def one_batch(message_batch_id: str, http: Request) -> Json:
        return await batches.body_of(await batches.find(http, message_batch_id))

    @routes.post(_PATH + "/{message_batch_id}/cancel")
    async def cancel(message_batch_id: str, http: Request) -> Json:
        return await batches.body_of(await batches.cancel(await batches.find(http, message_batch_id)))

    @routes.delete(_PATH + "/{message_batch_id}")
    async def delete(message_batch_id: str, http: Request) -> Json:
        job = await batches.find(http, message_batch_id)
        await batches.delete(job)
        return {"id": job.id, "type": "message_batch_deleted"}

    @routes.get(_PATH + "/{message_batch_id}/results")
    async def results(message_batch_id: str, http: Request) -> Response:
        files = await _result_files(store, await batches.find(http, message_batch_id))
        return AnswerStream(
            _joined(contents, files),
            media_type="application/x-jsonl",
            headers={"Content-Length": str(sum(file.num_bytes for file in files))},
        )

    return routes


async def _stored(upload: Upload, job_id: JobId, data: memoryview) -> FileRecord:
    """Stores the input file. Raises ApiError and StoreFull."""
    upload.begin("file", f"{job_id}_input.jsonl")
    upload.field("purpose", "batch")
    upload.field("expires_after[anchor]", "created_at")
    upload.field("expires_after[seconds]", str(WINDOW_S))
    for start in range(0, len(data), CHUNK_BYTES):
        await upload.add(data[start : start + CHUNK_BYTES])
    return await upload.commit()


async def _result_files(store: Store, job: JobRecord) -> list[FileRecord]:
    """Returns the files with the results. Raises ApiError if there are none yet, or one was deleted."""
    if not job.is_over:
        raise ApiError(400, f"message_batch_id={job.id!r}: there are no results before it has ended")
    files = [await store.file(each) for each in (job.output_file_id, job.error_file_id) if each]
    there = [file for file in files if file]
    if job.status == "failed":
        why = "".join(f": {problem.message}" for problem in job.problems)
        raise ApiError(404, f"message_batch_id={job.id!r}: it failed, and has no results{why}")
    if not there or len(there) < len(files):
        raise ApiError(404, f"message_batch_id={job.id!r}: its results were deleted")
    return there


async def _joined(contents: Contents, files: Sequence[FileRecord]) -> AsyncIterator[bytes]:
    for file in files:
        async for chunk in content_of(contents, file):
            yield chunk


def batch_body(job: JobRecord, tally: Tally) -> Json:
    ended_at = job.completed_at or job.expired_at or job.cancelled_at or job.failed_at
    archived_at = None if ended_at is None or ended_at + KEPT_S > time.time() else ended_at + KEPT_S
    has_results = ended_at is not None and archived_at is None and job.status != "failed"
    return {
        "id": job.id,
        "type": "message_batch",
        "processing_status": _processing_status(job),
        "request_counts": _counts(job, tally),
        "created_at": _time(job.created_at),
        "expires_at": _time(job.expires_at),
        "ended_at": _time(ended_at),
        "cancel_initiated_at": _time(job.cancelling_at),
        "archived_at": _time(archived_at),
        # Anthropic's clients put their base URL before a path. Behind a proxy, only they know the server's name.
        "results_url": f"{_PATH}/{job.id}/results" if has_results else None,
    }


def _processing_status(job: JobRecord) -> str:
    if job.is_over:
        return "ended"
    return "canceling" if job.status == "cancelling" else "in_progress"


def _counts(job: JobRecord, tally: Tally) -> dict[str, int]:
    """Returns the counts as in Anthropic's API: until the batch has ended, all requests are processing. They add up to
    the number of requests. A failed batch has no results, so all its requests are errors."""
    if not job.is_over:
        return {"processing": job.num_lines, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    if job.status == "failed":
        tally = Tally()
    num_answered = tally.num_completed + tally.num_cancelled + tally.num_expired
    return {
        "processing": 0,
        "succeeded": tally.num_completed,
        "errored": job.num_lines - num_answered,
        "canceled": tally.num_cancelled,
        "expired": tally.num_expired,
    }


def _time(at: int | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
