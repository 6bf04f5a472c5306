"""What becomes of a line: OpenAI's output objects, and the files they end up in."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from alignedserve.batch.config import CHUNK_BYTES
from alignedserve.batch.patience import patiently
from alignedserve.batch.validate import BatchLine
from alignedserve.store import FileId, FileRecord, JobRecord, LineResult, Store
from alignedserve.store.records import new_file_id

# results fetched at a time when files are written
_STEP = 256


@dataclass(frozen=True)
class Answer:
    """What the endpoint says to a line's body."""

    status: int
    body: dict[str, Any]


def answered(line: BatchLine, answer: Answer) -> LineResult:
    usage = answer.body.get("usage") or {}
    response = {
        "status_code": answer.status,
        "request_id": f"req_{secrets.token_hex(12)}",
        "body": answer.body,
    }
    is_error = answer.status >= 400
    return LineResult(
        is_error,
        _text(line, response, None, is_error),
        usage.get("prompt_tokens", 0),
        usage.get("completion_tokens", 0),
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
    )


def too_late(line: BatchLine) -> LineResult:
    message = "This request could not be executed before the completion window expired."
    return LineResult(True, _text(line, None, {"code": "batch_expired", "message": message}, is_error=True))


def _text(
    line: BatchLine, response: dict[str, Any] | None, error: dict[str, Any] | None, is_error: bool
) -> bytes:
    found: dict[str, Any] = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    if is_error:
        # where to look in the input
        found["line"] = line.number
    return msgspec.json.encode(found)


class _FileWriter:
    def __init__(self, store: Store, filename: str) -> None:
        self._store = store
        self._id = new_file_id()
        self._filename = filename
        self._buffer = bytearray()
        self._num_bytes = 0
        self._num_chunks = 0

    async def add(self, text: bytes) -> None:
        self._buffer += text + b"\n"
        if len(self._buffer) >= CHUNK_BYTES:
            await self._flush()

    async def close(self) -> FileRecord | None:
        """None: nothing was written."""
        if self._buffer:
            await self._flush()
        if not self._num_bytes:
            return None
        now = int(time.time())
        return FileRecord(self._id, self._filename, "batch_output", self._num_bytes, self._num_chunks, now)

    async def _flush(self) -> None:
        await patiently(self._store.put_chunk, self._id, self._num_chunks, bytes(self._buffer))
        self._num_chunks += 1
        self._num_bytes += len(self._buffer)
        self._buffer.clear()


@dataclass(frozen=True)
class ResultFiles:
    """Not committed yet."""

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


async def write_results(store: Store, job: JobRecord) -> ResultFiles:
    """All there are, in the order of the input."""
    output = _FileWriter(store, f"{job.id}_output.jsonl")
    errors = _FileWriter(store, f"{job.id}_error.jsonl")
    lines = sorted(await patiently(store.lines_done, job.id))
    for start in range(0, len(lines), _STEP):
        for result in await patiently(store.results, job.id, lines[start : start + _STEP]):
            if result is not None:
                await (errors if result.is_error else output).add(result.text)
    return ResultFiles(await output.close(), await errors.close())
