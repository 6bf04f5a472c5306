"""The body of a batch, and the parts of it that are stored."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from alignedserve.gateway.generation.endpoint import DirectAnswer, Endpoint
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.fields import BodyFields
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.openai.batch_jobs.files import MAX_EXPIRES_S, MIN_EXPIRES_S
from alignedserve.gateway.openai.responses.body import Metadata
from alignedserve.gateway.openai.responses.items import kept_json
from alignedserve.gateway.webhooks.urls import check_url

Name = Annotated[str, Field(max_length=256)]
WEBHOOK_URL: Final = "alignedserve.webhook_url"


class ExpiresAfter(BodyFields):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRES_S, le=MAX_EXPIRES_S)]


class OwnFields(BodyFields):
    """Fields that OpenAI's batches lack."""

    # The URL that is notified when the batch has ended.
    webhook_url: str | None = None


class BatchBody(BodyFields):
    # An id, or the URL of a file that is read at its place.
    input_file_id: Annotated[str, Field(max_length=4096)]
    endpoint: Name
    completion_window: Name
    metadata: Metadata | None = None
    # How long the output and error files are kept.
    output_expires_after: ExpiresAfter | None = None
    alignedserve: OwnFields | None = None


class AskedBatch(DirectAnswer, frozen=True, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    # JSON.
    metadata: bytes | None
    output_expires_after_s: int | None
    webhook_url: str | None


def asked_batch(body: BatchBody, model: ServedModel, limits: CallLimits) -> AskedBatch:
    """Returns the batch that the body asks for. Raises ApiError and InvalidRequest."""
    webhook_url = body.alignedserve.webhook_url if body.alignedserve else None
    try:
        if webhook_url is not None:
            check_url(webhook_url)
    except ValueError as error:
        raise ApiError(400, f"{WEBHOOK_URL}: {error}", param=WEBHOOK_URL) from None
    return AskedBatch(
        memoryview(b""),
        input_file_id=body.input_file_id,
        endpoint=body.endpoint,
        completion_window=body.completion_window,
        metadata=None if body.metadata is None else kept_json("metadata", body.metadata),
        output_expires_after_s=body.output_expires_after.seconds if body.output_expires_after else None,
        webhook_url=webhook_url,
    )


BATCHES: Final = Endpoint("/v1/batches", BatchBody, asked_batch, AskedBatch)
