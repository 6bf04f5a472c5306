"""The results of lines, in the format of the job's API, and the files that contain them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from alignedserve.batch.config import MAX_RESULT_BYTES
from alignedserve.batch.file_writer import FileWriter
from alignedserve.store import BrokenOff, Contents, FileId, FileRecord, JobRecord, LineResult, Store
from alignedserve.store.records import Ending
from alignedserve.store.retry import RETRY_S, retried

# Results that are fetched at once while files are written.
_STEP = 256
# Longest pause before interrupted files are written again, in seconds.
_MAX_PAUSE_S = 10.0


@dataclass(frozen=True)
class BatchLine:
    number: int
    custom_id: str
    # The JSON object as the client sent it.
    body: bytes
    # Size of the line in the file.
    num_bytes: int = 0
    # Whether the line belongs to a message batch.
    is_message: bool = False


@dataclass(frozen=True)
class LineAnswer:
    """The endpoint's answer to a line's body."""

    status: int
    # A JSON object.
    body: dict[str, Any] | msgspec.Raw
    # The body's usage; empty for a failure.
    usage: Mapping[str, Any] = field(default_factory=dict)


def answered(line: BatchLine, answer: LineAnswer) -> LineResult:
    usage = answer.usage
    response = {
        "status_code": answer.status,
        "request_id": f"req_{secrets.token_hex(12)}",
        "body": answer.body,
    }
    is_error = answer.status >= 400
    text = _text(line, response, None, is_error)
    if len(text) > MAX_RESULT_BYTES:
        return failed(line, "answer_too_large", f"The answer has more than {MAX_RESULT_BYTES} bytes.")
    return LineResult(
        is_error,
        text,
        usage.get("prompt_tokens", 0),
        usage.get("completion_tokens", 0),
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
    )


def failed(line: BatchLine, code: str, message: str, ending: Ending | None = None) -> LineResult:
    error = {"code": code, "message": message}
    return LineResult(True, _text(line, None, error, is_error=True, ending=ending), ending=ending)


def too_late(line: BatchLine) -> LineResult:
    message = "This request could not be executed before the completion window expired."
    return failed(line, "batch_expired", message, "expired")


def cancelled(line: BatchLine) -> LineResult:
    message = "This request was not executed because the batch was cancelled."
    return failed(line, "batch_cancelled", message, "cancelled")


def fallen(line: BatchLine, count: int) -> LineResult:
    message = (
        f"This request was begun {count} times, and each time the server went down before it was answered."
    )
    return failed(line, "line_failed", message)


def not_stored(line: BatchLine) -> LineResult:
    return failed(
        line, "storage_full", "The answer could not be stored: files and batches have their most bytes."
    )


def _text(
    line: BatchLine,
    response: dict[str, Any] | None,
    error: dict[str, Any] | None,
    is_error: bool,
    ending: Ending | None = None,
) -> bytes:
    if line.is_message:
        result = _message_result(response, error, ending)
        return msgspec.json.encode({"custom_id": line.custom_id, "result": result})
    found: dict[str, Any] = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    if is_error:
        # The number of the line in the input file.
        found["line"] = line.number
    return msgspec.json.encode(found)


def _message_result(
    response: dict[str, Any] | None, error: dict[str, Any] | None, ending: Ending | None
) -> dict[str, Any]:
    """Returns the result in the format of a message batch."""
    if ending is not None:
        return {"type": "canceled" if ending == "cancelled" else ending}
    if response is None:
        assert error
        failure = {"type": "error", "error": {"type": "api_error", "message": error["message"]}}
        return {"type": "errored", "error": failure}
    if response["status_code"] >= 400:
        return {"type": "errored", "error": response["body"]}
    return {"type": "succeeded", "message": response["body"]}


class _ResultFile(FileWriter):
    def __init__(self, contents: Contents, job: JobRecord, filename: str) -> None:
        # The file's content is exempt from the limits. Its results are counted until the file is complete and they are
        # deleted.
        super().__init__(contents.new_file(job.owner, is_bounded=False), job.owner, is_patient=True)
        self._filename = filename
        self._kept_s = job.output_expires_after_s

    async def closed(self) -> FileRecord | None:
        """Returns None if there was no content."""
        return await self.close(self._filename, "batch_output", self._kept_s) if self.num_bytes else None


@dataclass(frozen=True)
class ResultFiles:
    """The output and error files, before they are committed."""

    output: FileRecord | None
    errors: FileRecord | None

    @property
    def all(self) -> list[FileRecord]:
        return [file for file in (self.output, self.errors) if file]

    @property
    def output_id(self) -> FileId | None:
        return self.output.id if self.output else None

    @property
    def errors_id(self) -> FileId | None:
        return self.errors.id if self.errors else None


async def write_results(store: Store, contents: Contents, job: JobRecord) -> ResultFiles:
    """Writes all results in the order of the input. If it is interrupted, it starts over after increasing pauses, since
    a disk may stay full for a long time."""
    pause_s = RETRY_S
    while True:
        output = _ResultFile(contents, job, f"{job.id}_output.jsonl")
        errors = _ResultFile(contents, job, f"{job.id}_error.jsonl")
        try:
            return await _written(store, job, output, errors)
        except BaseException as error:
            await output.drop()
            await errors.drop()
            if not isinstance(error, BrokenOff):
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


async def _written(store: Store, job: JobRecord, output: _ResultFile, errors: _ResultFile) -> ResultFiles:
    lines = sorted(await retried(store.lines_done, job.id))
    start = 0
    while start < len(lines):
        found = await retried(store.results, job.id, lines[start : start + _STEP])
        for result in found:
            if result is not None:
                await (errors if result.is_error else output).add(result.text + b"\n")
        # A job that has ended has no results any more.
        start += len(found) or _STEP
    return ResultFiles(await output.closed(), await errors.closed())
