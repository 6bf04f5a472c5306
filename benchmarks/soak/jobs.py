"""Runs one batch job after the other. Each line must be answered once, as by the engine alone."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.soak.calls import Calls, Unexcused
from benchmarks.soak.faults import FaultLog
from benchmarks.soak.questions import Answer, Question
from benchmarks.soak.tally import Tally
from benchmarks.soak.transcript import difference

ENDPOINT = "/v1/chat/completions"
OVER = ("completed", "failed", "expired", "cancelled")
MIN_LINES, MAX_LINES = 10, 60
# The longest that such a small job may take, whatever the faults.
JOB_S = 420.0
LOOK_S = 0.25
# The error code of a line that was running at this many deaths of the gateway.
MAX_GATEWAY_DEATHS, GIVEN_UP = 4, "line_failed"


class Jobs:
    def __init__(
        self,
        calls: Calls,
        asked: Sequence[tuple[Question, Answer]],
        faults: FaultLog,
        tally: Tally,
        seed: int,
    ) -> None:
        self._calls = calls
        self._asked = asked
        self._faults = faults
        self._tally = tally
        self._dice = random.Random(f"jobs {seed}")
        self._begun_s = time.monotonic()
        # Batches for which each line is known to be answered.
        self._checked: set[str] = set()

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                await self._follow(await self._submit())
            except Unexcused as error:
                self._tally.object(f"batch: {error}")

    async def audit(self) -> None:
        """Checks every batch on the server, including those without a confirmation to the client."""
        try:
            for batch_id in await self._taken():
                if batch_id not in self._checked:
                    await self._follow(batch_id)
        except Unexcused as error:
            self._tally.object(f"batch: {error}")

    async def _taken(self) -> list[str]:
        found: list[str] = []
        while True:
            params: dict[str, Any] = {"limit": 100} | ({"after": found[-1]} if found else {})
            page = await self._calls.json("GET", "/v1/batches", params=params)
            found += [batch["id"] for batch in page["data"]]
            if not page["has_more"]:
                lost = self._checked - set(found)
                if lost:
                    self._tally.object(f"batches that are not there any more: {lost}")
                return found

    async def _submit(self) -> str:
        numbers = [
            self._dice.randrange(len(self._asked)) for _ in range(self._dice.randint(MIN_LINES, MAX_LINES))
        ]
        lines = [
            {"custom_id": f"{place}-{number}", "method": "POST", "url": ENDPOINT, "body": self._body(number)}
            for place, number in enumerate(numbers)
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        form = {"purpose": (None, b"batch"), "file": ("in.jsonl", content)}
        file = await self._calls.json("POST", "/v1/files", files=form)
        asked_for = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        return str((await self._calls.json("POST", "/v1/batches", json=asked_for))["id"])

    def _body(self, number: int) -> dict[str, Any]:
        return self._asked[number][0].body

    async def _follow(self, batch_id: str) -> None:
        """Waits until the batch is over, compares its lines, and deletes its files."""
        batch = await self._until_over(batch_id)
        content = await self._content(batch["output_file_id"])
        failed = await self._content(batch["error_file_id"])
        objections = self._objections(batch, content, failed)
        for what in objections:
            self._tally.object(f"batch {batch_id}: {what}")
        if not objections:
            self._tally.num_jobs += 1
        self._checked.add(batch_id)
        for name in ("input_file_id", "output_file_id", "error_file_id"):
            if batch[name]:
                # If an earlier answer was lost, the file is already deleted: a 404.
                await self._calls.call("DELETE", f"/v1/files/{batch[name]}")

    async def _until_over(self, batch_id: str) -> dict[str, Any]:
        give_up_s = time.monotonic() + JOB_S
        while time.monotonic() < give_up_s:
            batch: dict[str, Any] = await self._calls.json("GET", f"/v1/batches/{batch_id}")
            if batch["status"] in OVER:
                return batch
            await asyncio.sleep(LOOK_S)
        raise Unexcused(f"{batch_id} is not over after {JOB_S:g} s: {batch}")

    async def _content(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        response = await self._calls.call("GET", f"/v1/files/{file_id}/content")
        if response.status_code != 200:
            raise Unexcused(f"content of {file_id}: {response.status_code}")
        return [json.loads(line) for line in response.text.splitlines()]

    def _objections(
        self, batch: dict[str, Any], lines: list[dict[str, Any]], failed: list[dict[str, Any]]
    ) -> list[str]:
        """Returns what is wrong with the batch. Counts the lines that are right."""
        may_give_up = self._faults.num_gateway_faults(self._begun_s, time.monotonic()) >= MAX_GATEWAY_DEATHS
        given_up = [line for line in failed if may_give_up and _code(line) == GIVEN_UP]
        self._tally.num_given_up += len(given_up)
        found = [f"{line}" for line in failed if line not in given_up]
        if batch["status"] != "completed":
            found.append(f"it is {batch['status']}: {batch['errors']}")
        times = Counter(line["custom_id"] for line in [*lines, *failed])
        if len(times) != batch["request_counts"]["total"] or set(times.values()) > {1}:
            found.append(
                f"{len(times)} lines have an answer; the batch has {batch['request_counts']}; by line: {times}"
            )
        for line in lines:
            if what := self._difference(line):
                found.append(f"line {line['custom_id']}: {what}")
        return found

    def _difference(self, line: dict[str, Any]) -> str:
        response = line["response"]
        if response["status_code"] != 200:
            return str(response)
        choice = response["body"]["choices"][0]
        num_tokens = response["body"]["usage"]["completion_tokens"]
        expected = self._asked[int(line["custom_id"].split("-")[1])][1]
        what = difference(Answer(choice["message"]["content"], num_tokens, choice["finish_reason"]), expected)
        if not what:
            self._tally.num_lines += 1
            self._tally.num_tokens += num_tokens
        return what


def _code(line: dict[str, Any]) -> str | None:
    error = line.get("error") or (line.get("response") or {}).get("body", {}).get("error") or {}
    return error.get("code")
