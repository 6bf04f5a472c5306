"""`/v1/batches`, as in OpenAI's API."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response
from msgspec.structs import replace

from alignedserve.batch.forecast import JobForecast
from alignedserve.batch.job import parse_window
from alignedserve.batch.job_run import cancel_job
from alignedserve.batch.placed_inputs import PlacedInputs, is_url
from alignedserve.batch.runner import BatchRunner
from alignedserve.gateway.generation.responding import RequestBuilder
from alignedserve.gateway.http.description import request_body
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_pieces import Json
from alignedserve.gateway.http.keys import owner_of
from alignedserve.gateway.http.reading import json_body
from alignedserve.gateway.openai.batch_jobs.bodies import BATCHES, WEBHOOK_URL, AskedBatch, BatchBody
from alignedserve.gateway.openai.batch_jobs.files import find_file, list_response, viewer
from alignedserve.gateway.webhooks.urls import is_allowed
from alignedserve.store import (
    FileId,
    JobId,
    JobRecord,
    PlacedInput,
    Store,
    StoreFull,
    Tally,
    TooManyJobs,
)
from alignedserve.store.records import new_job_id
from alignedserve.store.retry import repeated

# Message batches are jobs, too, and appear here as all others.
_ONE = f"{BATCHES.path}/{{batch_id}}"
_ID = re.compile(r"(msg)?batch_[0-9a-f]{24}")

# Jobs of a listing that are read at a time.
JOBS_AT_A_TIME = 250

# A client that repeats a creation with the same key gets the job that it created first.
IdempotencyKey = Annotated[str | None, Header(max_length=255)]


def batch_routes(
    store: Store,
    runner: BatchRunner,
    endpoints: Sequence[str],
    request_builder: RequestBuilder,
    placed_inputs: PlacedInputs,
    is_shared: bool = False,
    allowed_urls: Sequence[str] = (),
) -> APIRouter:
    """`endpoints` are those that lines may call. `placed_inputs` are input files that need no upload. With `is_shared`,
    each API key sees the batches of all keys. A webhook URL of a batch must start with one of `allowed_urls`."""
    routes = APIRouter()

    def body_of(job: JobRecord, tally: Tally) -> Json:
        return batch_body(job, tally) | {"alignedserve": _forecast(job, tally, runner.forecast)}

    @routes.post(BATCHES.path, openapi_extra=request_body(BatchBody))
    async def create(http: Request, idempotency_key: IdempotencyKey = None) -> Response:
        owner = owner_of(http)
        asked = await request_builder.preparer.answer(BATCHES, await json_body(http), owner)
        assert isinstance(asked, AskedBatch)
        headers = request_builder.ignored_parameters.note(asked.ignored)
        _check_webhook(asked.webhook_url, allowed_urls)
        job_id = job_id_of(owner, idempotency_key)
        if idempotency_key and (earlier := await store.job(job_id)):
            _check_repeats(earlier, asked, idempotency_key)
            return _shown(body_of(earlier, await store.tally(job_id)), headers)
        job = await _new_job(store, asked, endpoints, placed_inputs, owner, viewer(http, is_shared))
        job = await add_job(store, replace(job, id=job_id), idempotency_key)
        # A concurrent call may have been first.
        _check_repeats(job, asked, str(idempotency_key))
        runner.wake()
        return _shown(body_of(job, await store.tally(job_id) if idempotency_key else Tally()), headers)

    @routes.get(BATCHES.path)
    async def list_batches(
        http: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> Response:
        page = await store.list_jobs(viewer(http, is_shared), after and JobId(after), limit)  # type: ignore[arg-type]
        if page is None:
            raise ApiError(400, f"after={after!r}: there is no such batch", param="after")
        found = await store.jobs([JobId(each) for each in page.ids])
        return list_response([body_of(job, tally) for job, tally in found], page.has_more)

    @routes.get(_ONE)
    async def one_batch(batch_id: str, http: Request) -> Response:
        job = await find_job(store, batch_id, viewer(http, is_shared))
        return _shown(body_of(job, await store.tally(job.id)))

    @routes.post(f"{_ONE}/cancel")
    async def cancel(batch_id: str, http: Request) -> Response:
        job = await cancel_job(store, await find_job(store, batch_id, viewer(http, is_shared)))
        if job.status not in ("cancelling", "cancelled"):
            raise ApiError(400, f"Cannot cancel a batch with status '{job.status}'.", param="batch_id")
        runner.cancel(job.id)
        return _shown(body_of(job, await store.tally(job.id)))

    return routes


def _shown(body: Json, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)


def _check_repeats(job: JobRecord, asked: AskedBatch, idempotency_key: str) -> None:
    """Raises ApiError if the same key was used to create a different batch."""
    found = job.input_file_id, job.endpoint, job.completion_window
    if found != (asked.input_file_id, asked.endpoint, asked.completion_window):
        raise used_key(idempotency_key)


def _check_webhook(url: str | None, allowed_urls: Sequence[str]) -> None:
    """Raises ApiError if this server does not post to `url`."""
    if url is not None and not is_allowed(url, allowed_urls):
        raise ApiError(400, f"{WEBHOOK_URL}: this server does not post to that URL", param=WEBHOOK_URL)


async def _new_job(
    store: Store,
    asked: AskedBatch,
    endpoints: Sequence[str],
    placed_inputs: PlacedInputs,
    owner: str,
    viewer: str | None,
) -> JobRecord:
    if asked.endpoint not in endpoints:
        message = f"endpoint={asked.endpoint!r}: must be one of {', '.join(endpoints)}"
        raise ApiError(400, message, param="endpoint")
    try:
        window_s = parse_window(asked.completion_window)
    except ValueError as error:
        raise ApiError(400, str(error), param="completion_window") from None
    placed: PlacedInput | None = None
    if is_url(asked.input_file_id):
        placed = await placed_inputs.find(asked.input_file_id)
    else:
        await _check_uploaded(store, asked.input_file_id, viewer)
    now = int(time.time())
    return JobRecord(
        id=new_job_id(),
        endpoint=asked.endpoint,
        input_file_id=FileId(asked.input_file_id),
        completion_window=asked.completion_window,
        created_at=now,
        expires_at=now + window_s,
        metadata=asked.metadata,
        owner=owner,
        output_expires_after_s=asked.output_expires_after_s,
        webhook_url=asked.webhook_url,
        placed_input=placed,
    )


async def _check_uploaded(store: Store, file_id: str, viewer: str | None) -> None:
    file = await find_file(store, file_id, viewer, "input_file_id", status=400)
    if file.purpose != "batch":
        message = f"input_file_id={file.id!r}: its purpose is {file.purpose!r}, and must be 'batch'"
        raise ApiError(400, message, param="input_file_id")


async def find_job(
    store: Store, batch_id: str, viewer: str | None, param: str = "batch_id", ids: re.Pattern[str] = _ID
) -> JobRecord:
    """Returns the job. Raises the same ApiError for a batch that does not exist, for another owner's, and for an id
    that is none of `ids`."""
    job = await store.job(JobId(batch_id)) if ids.fullmatch(batch_id) else None
    if job is None or viewer not in (None, job.owner):
        raise ApiError(404, f"{param}={batch_id!r}: there is no such batch", param=param)
    return job


def job_id_of(owner: str, idempotency_key: str | None, prefix: str = "batch_") -> JobId:
    """Returns the id of a new job, which is the same for all calls of an owner with the same key."""
    if not idempotency_key:
        return new_job_id(prefix)
    named = msgspec.json.encode([owner, idempotency_key])
    return JobId(prefix + hashlib.sha256(named).hexdigest()[:24])


def used_key(idempotency_key: str) -> ApiError:
    """Returns the error for a key that was used to create a different batch."""
    return ApiError(400, f"Idempotency-Key={idempotency_key!r}: another batch was created with it")


async def add_job(store: Store, job: JobRecord, idempotency_key: str | None) -> JobRecord:
    """Adds the job, and returns the stored job with this id. Two calls may be concurrent with the same
    `Idempotency-Key`: the first one's job is stored. Raises ApiError and StoreAway."""
    try:
        is_added = await repeated(store.add_job, job)
    except TooManyJobs as error:
        raise ApiError(429, str(error), code="too_many_batches") from None
    except StoreFull as error:
        raise ApiError(413, str(error), code="storage_full") from None
    if not is_added:
        raise ApiError(400, f"input_file_id={job.input_file_id!r}: it is gone", param="input_file_id")
    stored = await repeated(store.job, job.id) if idempotency_key else None
    return stored or job


def _forecast(job: JobRecord, tally: Tally, forecast: JobForecast) -> Json:
    """Returns the progress of a job, which OpenAI's object lacks."""
    estimate = forecast.of(job.id) if job.status == "in_progress" else None
    num_done = tally.num_completed + tally.num_failed
    progress = num_done / job.num_lines if job.num_lines else 0.0
    at = None
    if estimate is not None:
        progress = estimate.progress
        at = None if estimate.left_s is None else round(time.time() + estimate.left_s)
    return {"estimated_completion_at": at, "progress": round(progress, 4)}


def batch_body(job: JobRecord, tally: Tally) -> Json:
    problems = [
        {"code": each.code, "line": each.line, "message": each.message, "param": each.param}
        for each in job.problems
    ]
    return {
        "id": job.id,
        "object": "batch",
        "endpoint": job.endpoint,
        "model": job.model,
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": job.input_file_id,
        "completion_window": job.completion_window,
        "status": job.status,
        "output_file_id": job.output_file_id,
        "error_file_id": job.error_file_id,
        "created_at": job.created_at,
        "in_progress_at": job.in_progress_at,
        "expires_at": job.expires_at,
        "finalizing_at": job.finalizing_at,
        "completed_at": job.completed_at,
        "failed_at": job.failed_at,
        "expired_at": job.expired_at,
        "cancelling_at": job.cancelling_at,
        "cancelled_at": job.cancelled_at,
        "request_counts": {
            "total": job.num_lines,
            "completed": tally.num_completed,
            "failed": tally.num_failed,
        },
        "usage": {
            "input_tokens": tally.num_input_tokens,
            "input_tokens_details": {"cached_tokens": tally.num_cached_tokens},
            "output_tokens": tally.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tally.num_input_tokens + tally.num_output_tokens,
        },
        "metadata": msgspec.Raw(job.metadata) if isinstance(job.metadata, bytes) else job.metadata,
        "output_expires_after": None
        if job.output_expires_after_s is None
        else {"anchor": "created_at", "seconds": job.output_expires_after_s},
    }
