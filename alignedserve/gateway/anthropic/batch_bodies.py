"""The body of a message batch, and the input file that is made of it."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from alignedserve.batch.config import MAX_LINE_BYTES, MAX_LINES
from alignedserve.batch.job import Invalid
from alignedserve.batch.parse import LineProblem, Parsed, Wrong, parse
from alignedserve.batch.validate import Validator
from alignedserve.gateway.generation.endpoint import DirectAnswer, Endpoint
from alignedserve.gateway.http.errors import ANTHROPIC_PATH, ApiError
from alignedserve.gateway.http.fields import BodyFields
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.store import Problem

# Size of an input file: twice that of a body, and at least this number of bytes. Numbers may be written longer in it,
# and each line adds fields to its request.
MAX_INPUT_BYTES = 16 << 20


class BatchedRequest(BodyFields):
    custom_id: str
    # The body of a message. Only its model is checked before the request runs.
    params: dict[str, Any]


class MessageBatchBody(BodyFields):
    requests: list[BatchedRequest] = Field(min_length=1, max_length=MAX_LINES, fail_fast=True)


class PreparedBatch(DirectAnswer, frozen=True, kw_only=True):
    """`body` is the input file."""

    num_lines: int
    model: str | None


def message_batch(body: MessageBatchBody, model: ServedModel, limits: CallLimits) -> PreparedBatch:
    """Returns the batch that the body asks for. Includes the checks of a job's file, so that no job fails by them
    later. Raises ApiError."""
    validator = Validator(ANTHROPIC_PATH, model.names)
    lines, num_bytes, max_bytes = [], 0, max(MAX_INPUT_BYTES, 2 * limits.max_body_bytes)
    for number, request in enumerate(body.requests, 1):
        line = _line(number, request)
        validator.add(number, _found(number, line))
        if validator.is_enough:
            break
        lines.append(line + b"\n")
        num_bytes += len(lines[-1])
        if num_bytes > max_bytes:
            message = f"requests: as lines of a file they have more than {max_bytes} bytes"
            raise ApiError(413, message, param="requests", code="body_too_large")
    result = validator.result()
    if isinstance(result, Invalid):
        raise _refused(result.problems[0])
    return PreparedBatch(memoryview(b"".join(lines)), num_lines=result.num_lines, model=result.model)


def _line(number: int, request: BatchedRequest) -> bytes:
    line = {"custom_id": request.custom_id, "method": "POST", "url": ANTHROPIC_PATH, "body": request.params}
    try:
        return json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        # It has half of a surrogate pair, or an infinite number, or is nested too deeply.
        raise _refused(Problem("invalid_json_line", f"not JSON: {error}", number)) from None


def _found(number: int, line: bytes) -> Parsed | Wrong:
    try:
        return parse(line if len(line) <= MAX_LINE_BYTES else None, number)
    except LineProblem as error:
        return error.wrong


def _refused(problem: Problem) -> ApiError:
    place = "requests" if problem.line is None else f"requests.{problem.line - 1}"
    return ApiError(400, f"{place}: {problem.message}", param="requests")


MESSAGE_BATCHES = Endpoint(f"{ANTHROPIC_PATH}/batches", MessageBatchBody, message_batch, PreparedBatch)
