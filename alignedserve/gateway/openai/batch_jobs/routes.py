"""`/v1/batches`, as in OpenAI's API."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from alignedserve.batch.forecast import JobForecast
from alignedserve.batch.job import parse_window
from alignedserve.batch.placed_inputs import PlacedInputs, is_url
from alignedserve.batch.runner import BatchRunner
from alignedserve.gateway.generation.responding import RequestBuilder
from alignedserve.gateway.http.description import request_body
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_pieces import Json
from alignedserve.gateway.http.keys import owner_of
from alignedserve.gateway.http.reading import json_body
from alignedserve.gateway.openai.batch_jobs.bodies import BATCHES, WEBHOOK_URL, AskedBatch, BatchBody
from alignedserve.gateway.openai.batch_jobs.files import find_file, list_response
from alignedserve.gateway.openai.batch_jobs.job_api import IdempotencyKey, JobApi
from alignedserve.gateway.webhooks.urls import is_allowed
from alignedserve.store import FileId, JobId, JobRecord, Listing, PlacedInput, Store, Tally

_ONE = f"{BATCHES.path}/{{batch_id}}"


@dataclass(frozen=True)
class BatchApi(JobApi[AskedBatch]):
    # Routes that lines may call.
    endpoints: Sequence[str]
    # Input files that need no upload.
    placed_inputs: PlacedInputs

    id_prefix = "batch_"
    # Message batches are jobs, too, and appear here as all others.
    ids = re.compile(r"(msg)?batch_[0-9a-f]{24}")
    param = "batch_id"

    def body(self, job: JobRecord, tally: Tally) -> Json:
        return batch_body(job, tally) | {"alignedserve": _forecast(job, tally, self.runner.forecast)}

    def _is_same(self, job: JobRecord, asked: AskedBatch) -> bool:
        found = job.input_file_id, job.endpoint, job.completion_window
        return found == (asked.input_file_id, asked.endpoint, asked.completion_window)

    def _check_cancelled(self, job: JobRecord) -> None:
        if job.status not in ("cancelling", "cancelled"):
            raise ApiError(400, f"Cannot cancel a batch with status '{job.status}'.", param="batch_id")

    async def _new_job(self, job_id: JobId, asked: AskedBatch, owner: str, viewer: str | None) -> JobRecord:
        if asked.endpoint not in self.endpoints:
            message = f"endpoint={asked.endpoint!r}: must be one of {', '.join(self.endpoints)}"
            raise ApiError(400, message, param="endpoint")
        try:
            window_s = parse_window(asked.completion_window)
        except ValueError as error:
            raise ApiError(400, str(error), param="completion_window") from None
        placed: PlacedInput | None = None
        if is_url(asked.input_file_id):
            placed = await self.placed_inputs.find(asked.input_file_id)
        else:
            await self._check_uploaded(asked.input_file_id, viewer)
        now = int(time.time())
        return JobRecord(
            id=job_id,
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

    async def _check_uploaded(self, file_id: str, viewer: str | None) -> None:
        file = await find_file(self.store, file_id, viewer, "input_file_id", status=400)
        if file.purpose != "batch":
            message = f"input_file_id={file.id!r}: its purpose is {file.purpose!r}, and must be 'batch'"
            raise ApiError(400, message, param="input_file_id")


def batch_routes(
    store: Store,
    runner: BatchRunner,
    endpoints: Sequence[str],
    request_builder: RequestBuilder,
    placed_inputs: PlacedInputs,
    is_shared: bool = False,
    allowed_urls: Sequence[str] = (),
) -> APIRouter:
    """See BatchApi. A webhook URL of a batch must start with one of `allowed_urls`."""
    routes, batches = APIRouter(), BatchApi(store, runner, is_shared, endpoints, placed_inputs)

    @routes.post(BATCHES.path, openapi_extra=request_body(BatchBody))
    async def create(http: Request, idempotency_key: IdempotencyKey = None) -> Response:
        owner = owner_of(http)
        asked = await request_builder.preparer.answer(BATCHES, await json_body(http), owner)
        assert isinstance(asked, AskedBatch)
        headers = request_builder.ignored_parameters.note(asked.ignored)
        _check_webhook(asked.webhook_url, allowed_urls)
        job = await batches.create(http, asked, owner, idempotency_key)
        tally = await store.tally(job.id) if idempotency_key else Tally()
        return _shown(batches.body(job, tally), headers)

    @routes.get(BATCHES.path)
    async def list_batches(
        http: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> Response:
        page = await store.page(Listing("jobs", batches.viewer(http), after, limit))
        if page is None:
            raise ApiError(400, f"after={after!r}: there is no such batch", param="after")
        return list_response(await batches.bodies_of(page.ids), page.has_more)

    @routes.get(_ONE)
    async def one_batch(batch_id: str, http: Request) -> Response:
        job = await batches.find(http, batch_id)
        return _shown(batches.body(job, await store.tally(job.id)))

    @routes.post(f"{_ONE}/cancel")
    async def cancel(batch_id: str, http: Request) -> Response:
        job = await batches.cancel(await batches.find(http, batch_id))
        return _shown(batches.body(job, await store.tally(job.id)))

    return routes


def _shown(body: Json, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)


def _check_webhook(url: str | None, allowed_urls: Sequence[str]) -> None:
    """Raises ApiError if this server does not post to `url`."""
    if url is not None and not is_allowed(url, allowed_urls):
        raise ApiError(400, f"{WEBHOOK_URL}: this server does not post to that URL", param=WEBHOOK_URL)


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
