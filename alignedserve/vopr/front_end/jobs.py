"""Clients with batch jobs: each uploads a file, watches its job, checks every line, and deletes the files."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from alignedserve.vopr.failures import Broken
from alignedserve.vopr.front_end.answers import check_whole
from alignedserve.vopr.front_end.calls import Calls
from alignedserve.vopr.front_end.chats import CHATS, COMPLETIONS, asked
from alignedserve.vopr.front_end.words import Question
from alignedserve.vopr.history import SubmitJob

# Seconds until a client checks again whether its job has ended.
LOOK_S = 2.0
# A line that was running at this many deaths of its gateway is answered with an error (batch/config.py).
NUM_FALLS = 4
_BOUNDARY = "boundary"
_FORM = f"multipart/form-data; boundary={_BOUNDARY}"


class JobClient:
    def __init__(
        self, batch: SubmitJob, questions: Sequence[Question], calls: Calls, num_troubles: Callable[[], int]
    ) -> None:
        self._batch = batch
        self._questions = questions
        self._calls = calls
        self._num_troubles = num_troubles
        self._path = CHATS if batch.is_chat else COMPLETIONS
        self._name = f"owner of {batch.key}"

    async def run(self) -> str:
        """Returns how it ended."""
        job = await self._until_over(await self._created())
        may_be = ("completed",) if self._batch.cancels_after_s is None else ("completed", "cancelled")
        if job["status"] not in may_be:
            raise Broken(f"a job is {job['status']} ({job['id']}, {job['errors']}, {job['request_counts']})")
        await self._check_results(job)
        for name in ("input_file_id", "output_file_id", "error_file_id"):
            if job[name]:
                # An earlier call may have deleted it. Or it is the input of a job that an earlier call created without
                # getting an answer.
                path = f"/v1/files/{job[name]}"
                await self._calls.ask(self._name, "DELETE", path, is_enough=(404,), comes_again=(400,))
        return f"job {job['status']}"

    async def _created(self) -> Any:
        lines = [json.dumps(self._line(index, each)).encode() for index, each in enumerate(self._questions)]
        file = await self._ask("POST", "/v1/files", _form(b"\n".join(lines)), _FORM)
        asks = {"input_file_id": file["id"], "endpoint": self._path, "completion_window": "24h"}
        return await self._ask("POST", "/v1/batches", json.dumps(asks).encode())

    async def _until_over(self, job: Any) -> Any:
        path, waited_s = f"/v1/batches/{job['id']}", 0.0
        cancels_after_s = self._batch.cancels_after_s
        while job["status"] in ("validating", "in_progress", "finalizing", "cancelling"):
            if cancels_after_s is not None and waited_s >= cancels_after_s:
                cancels_after_s = None
                # It may be too late for that.
                await self._calls.ask(self._name, "POST", f"{path}/cancel", is_enough=(400,))
            left_s = LOOK_S if cancels_after_s is None else min(LOOK_S, cancels_after_s - waited_s)
            await asyncio.sleep(left_s)
            waited_s += left_s
            job = await self._ask("GET", path)
        return job

    async def _check_results(self, job: Any) -> None:
        found: Counter[str] = Counter()
        for name in ("output_file_id", "error_file_id"):
            if not job[name]:
                continue
            answer = await self._calls.ask(self._name, "GET", f"/v1/files/{job[name]}/content")
            for result in map(json.loads, answer.body.splitlines()):
                found[result["custom_id"]] += 1
                self._check_result(result, self._questions[int(result["custom_id"])], job["status"])
        counts = job["request_counts"]
        wanted = Counter(map(str, range(len(self._questions))))
        # A job that is cancelled before its file is validated has no lines.
        if (found != wanted and job["in_progress_at"]) or found - wanted:
            raise Broken(f"a job does not have each line exactly once ({found})")
        if counts["completed"] + counts["failed"] != found.total():
            raise Broken(f"a job has {found.total()} lines in its files, but counts others ({counts})")

    def _check_result(self, result: Any, question: Question, status: str) -> None:
        if status == "cancelled" and (result["error"] or {}).get("code") == "batch_cancelled":
            self._calls.count("line cancelled")
        elif result["error"]:
            # The line was running at each death of a gateway.
            if result["error"]["code"] != "line_failed" or self._num_troubles() < NUM_FALLS:
                raise Broken(f"a line is answered with an error ({result['error']})")
            self._calls.count("line failed")
        else:
            check_whole(result["response"]["body"], question, self._batch.is_chat)
            self._calls.count("line")

    def _line(self, index: int, question: Question) -> dict[str, Any]:
        body = asked(question, self._batch.is_chat, {})
        return {"custom_id": str(index), "method": "POST", "url": self._path, "body": body}

    async def _ask(self, *what: Any) -> Any:
        return await self._calls.ask_json(self._name, *what)


def _form(content: bytes) -> bytes:
    head = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    file = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    return head.encode() + file.encode() + content + f"\r\n--{_BOUNDARY}--\r\n".encode()
