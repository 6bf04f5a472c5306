"""/v1/batches, as in OpenAI's API."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response
from msgspec.structs import replace
from pydantic import Field

from alignedserve.batch.forecast import Forecast
from alignedserve.batch.job import parse_window
from alignedserve.batch.job_run import cancel_job
from alignedserve.batch.placed_inputs import PlacedInputs, is_url
from alignedserve.batch.runner import BatchRunner
from alignedserve.gateway.fields import Fields
from alignedserve.gateway.generation.endpoint import unknown_in
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_pieces import Json
from alignedserve.gateway.http.keys import owner_of
from alignedserve.gateway.openai.files import (
    MAX_EXPIRES_S,
    MIN_EXPIRES_S,
    find_file,
    list_response,
    viewer,
)
from alignedserve.gateway.telemetry.ignored_parameters import IgnoredParameters
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

# Message batches are jobs too, and are described here as any other.
_ID = re.compile(r"(msg)?batch_[0-9a-f]{24}")

# The number of jobs of a listing that are read at a time.
JOBS_AT_A_TIME = 250

# A client that repeats a creation with the same key gets the job that it has created.
IdempotencyKey = Annotated[str | None, Header(max_length=255)]

Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]


class ExpiresAfter(Fields):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRES_S, le=MAX_EXPIRES_S)]


class OwnFields(Fields):
    """What OpenAI's batches lack."""

    # Where the end of the batch is told.
    webhook_url: str | None = None


class BatchBody(Fields):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[Key, Value], Field(max_length=16)] | None = None
    # How long the output and error files are kept.
    output_expires_after: ExpiresAfter | None = None
    alignedserve: OwnFields | None = None


def batch_routes(
    store: Store,
    runner: BatchRunner,
    endpoints: Sequence[str],
    ignored_parameters: IgnoredParameters,
    placed_inputs: PlacedInputs,
    is_shared: bool = False,
    is_strict: bool = False,
    allowed_urls: Sequence[str] = (),
) -> APIRouter:
    """`endpoints` are those that a job's lines may call; `placed_inputs` are files that need no upload. With
    `is_shared`, everyone sees all batches, whichever key made them. With `is_strict`, unknown parameters are
    refused. A webhook of a batch's own must begin like one of `allowed_urls`."""
    routes = APIRouter()

    def body_of(job: JobRecord, tally: Tally) -> Json:
        return batch_body(job, tally) | {"alignedserve": _forecast(job, tally, runner.forecast)}

    @routes.post("/v1/batches")
    async def create(
        body: BatchBody, http: Request, answer: Response, idempotency_key: IdempotencyKey = None
    ) -> Json:
        answer.headers.update(ignored_parameters.note(unknown_in(body, is_strict)))
        webhook_url = body.alignedserve.webhook_url if body.alignedserve else None
        _check_webhook(webhook_url, allowed_urls)
        owner = owner_of(http)
        job_id = job_id_of(owner, idempotency_key)
        if idempotency_key and (earlier := await store.job(job_id)):
            if _asked_of(earlier) != (body.input_file_id, body.endpoint, body.completion_window):
                raise used_key(idempotency_key)
            return body_of(earlier, await store.tally(job_id))
        job = await _new_job(store, body, endpoints, placed_inputs, owner, viewer(http, is_shared))
        job = await add_job(store, replace(job, id=job_id, webhook_url=webhook_url), idempotency_key)
        if _asked_of(job) != (body.input_file_id, body.endpoint, body.completion_window):
            # A call at the same time came first.
            raise used_key(str(idempotency_key))
        runner.wake()
        return body_of(job, await store.tally(job_id) if idempotency_key else Tally())

    @routes.get("/v1/batches")
    async def list_batches(
        http: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> Response:
        page = await store.list_jobs(viewer(http, is_shared), after and JobId(after), limit)  # type: ignore[arg-type]
        if page is None:
            raise ApiError(400, f"after={after!r}: there is no such batch", param="after")
        found = await store.jobs([JobId(each) for each in page.ids])
        return list_response([body_of(job, tally) for job, tally in found], page.has_more)

    @routes.get("/v1/batches/{batch_id}")
    async def one_batch(batch_id: str, http: Request) -> Json:
        job = await find_job(store, batch_id, viewer(http, is_shared))
        return body_of(job, await store.tally(job.id))

    @routes.post("/v1/batches/{batch_id}/cancel")
    async def cancel(batch_id: str, http: Request) -> Json:
        job = await cancel_job(store, await find_job(store, batch_id, viewer(http, is_shared)))
        if job.status not in ("cancelling", "cancelled"):
            raise ApiError(400, f"Cannot cancel a batch with status '{job.status}'.", param="batch_id")
        runner.cancel(job.id)
        return body_of(job, await store.tally(job.id))

    return routes


def _check_webhook(url: str | None, allowed_urls: Sequence[str]) -> None:
    """Raises ApiError."""
    name = "alignedserve.webhook_url"
    try:
        if url is None or is_allowed(url, allowed_urls):
            return
    except ValueError as error:
        raise ApiError(400, f"{name}: {error}", param=name) from None
    raise ApiError(400, f"{name}: this server does not post to that URL", param=name)


async def _new_job(
    store: Store,
    body: BatchBody,
    endpoints: Sequence[str],
    placed_inputs: PlacedInputs,
    owner: str,
    viewer: str | None,
) -> JobRecord:
    if body.endpoint not in endpoints:
        message = f"endpoint={body.endpoint!r}: must be one of {', '.join(endpoints)}"
        raise ApiError(400, message, param="endpoint")
    try:
        window_s = parse_window(body.completion_window)
    except ValueError as error:
        raise ApiError(400, str(error), param="completion_window") from None
    placed: PlacedInput | None = None
    if is_url(body.input_file_id):
        placed = await placed_inputs.find(body.input_file_id)
    else:
        await _check_uploaded(store, body.input_file_id, viewer)
    now = int(time.time())
    return JobRecord(
        id=new_job_id(),
        endpoint=body.endpoint,
        input_file_id=FileId(body.input_file_id),
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + window_s,
        metadata=body.metadata,
        owner=owner,
        output_expires_after_s=body.output_expires_after.seconds if body.output_expires_after else None,
        placed_input=placed,
    )


def _asked_of(job: JobRecord) -> tuple[str, str, str]:
    return job.input_file_id, job.endpoint, job.completion_window


async def _check_uploaded(store: Store, file_id: str, viewer: str | None) -> None:
    file = await find_file(store, file_id, viewer, "input_file_id", status=400)
    if file.purpose != "batch":
        message = f"input_file_id={file.id!r}: its purpose is {file.purpose!r}, and must be 'batch'"
        raise ApiError(400, message, param="input_file_id")


async def find_job(
    store: Store, batch_id: str, viewer: str | None, param: str = "batch_id", ids: re.Pattern[str] = _ID
) -> JobRecord:
    """Returns the job. Raises ApiError, which is the same for a batch that does not exist, for another owner's, and for
    one whose id is not one of `ids`."""
    job = await store.job(JobId(batch_id)) if ids.fullmatch(batch_id) else None
    if job is None or viewer not in (None, job.owner):
        raise ApiError(404, f"{param}={batch_id!r}: there is no such batch", param=param)
    return job


def job_id_of(owner: str, idempotency_key: str | None, prefix: str = "batch_") -> JobId:
    """Returns the id of the job that is to be created: one for all calls of an owner with the same key."""
    if not idempotency_key:
        return new_job_id(prefix)
    named = msgspec.json.encode([owner, idempotency_key])
    return JobId(prefix + hashlib.sha256(named).hexdigest()[:24])


def used_key(idempotency_key: str) -> ApiError:
    """Returns the error for a key with which something else was created."""
    return ApiError(400, f"Idempotency-Key={idempotency_key!r}: another batch was created with it")


async def add_job(store: Store, job: JobRecord, idempotency_key: str | None) -> JobRecord:
    """Adds the job, and returns the one of this id that is there then: of two calls at the same time with the same
    `Idempotency-Key`, the first has added its own. Raises ApiError and StoreAway."""
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


def _forecast(job: JobRecord, tally: Tally, forecast: Forecast) -> Json:
    """Returns what OpenAI's object lacks."""
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
        "metadata": job.metadata,
        "output_expires_after": None
        if job.output_expires_after_s is None
        else {"anchor": "created_at", "seconds": job.output_expires_after_s},
    }
