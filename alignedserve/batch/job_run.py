"""One job, worked on by the holder of its lease: from wherever it is to its end, unless it is stopped.

What has been done is in the store alone, so that whoever goes on with it does so from there. A line's answer and the
mark that it has one are the same thing there: a line may be run twice, and is answered once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from alignedserve.batch.config import BatchConfig
from alignedserve.batch.job import AllAnswered, CancelAsked, Event, Invalid, TimeUp, Valid, Written, after
from alignedserve.batch.lines import FileGone, lines_of
from alignedserve.batch.patience import patiently
from alignedserve.batch.results import Answer, answered, too_late, write_results
from alignedserve.batch.room import Room
from alignedserve.batch.validate import BatchLine, Validator, batch_line
from alignedserve.store import FileRecord, JobRecord, Lease, LineResult, Problem, Store

# (endpoint, body, deadline on time.time()'s clock): the endpoint's answer. Never raises for a bad body.
Ask = Callable[[str, dict[str, Any], float], Awaitable[Answer]]

# try again, as often as need be
_NOT_TAKEN = (429, 503)


@dataclass(frozen=True)
class Shared:
    """What all jobs of a gateway have in common."""

    store: Store
    ask: Ask
    served_model: str
    config: BatchConfig
    # for lines that run, and for jobs whose lines do
    room: Room
    jobs: asyncio.Semaphore
    # no line begins any more
    stopping: asyncio.Event
    # a line was not answered in time
    on_late: Callable[[], None]


@dataclass(eq=False)
class JobRun:
    shared: Shared
    lease: Lease
    _answering: asyncio.Task[Event | None] | None = field(default=None, init=False)

    async def run(self) -> None:
        """Until the job is over, or everything is stopping. Raises LeaseLost, alone or in a group."""
        store = self.shared.store
        while not self.shared.stopping.is_set():
            job = await patiently(store.job, self.lease.job_id)
            if job is None or job.is_over:
                return
            event, files = await self._next(job)
            if event is not None:
                changed = after(job, event, int(time.time()))
                # when it is another by now it was cancelled meanwhile: seen in the next round
                await patiently(store.finish_job, job, changed, self.lease, files)

    def cancel(self) -> None:
        """It is being cancelled, the store says: no more lines. Safe to repeat."""
        if self._answering:
            self._answering.cancel()

    async def _next(self, job: JobRecord) -> tuple[Event | None, Sequence[FileRecord]]:
        match job.status:
            case "validating":
                return await self._validate(job), []
            case "in_progress":
                return await self._answer_what_is_there(job), []
            case _:
                files = await write_results(self.shared.store, job)
                return Written(files.output_id, files.errors_id), files.all

    async def _validate(self, job: JobRecord) -> Valid | Invalid:
        validator = Validator(job.endpoint, self.shared.served_model)
        try:
            async for line in lines_of(self.shared.store, job.input_file_id):
                validator.add(line)
                if validator.is_enough:
                    break
        except FileGone:
            return _without_file(job)
        return validator.result()

    async def _answer_what_is_there(self, job: JobRecord) -> Event | None:
        try:
            return await self._answer(job)
        except (FileGone, ExceptionGroup) as error:
            is_gone = isinstance(error, FileGone) or error.subgroup(FileGone) is not None
            if not is_gone:
                raise
            # else it would be tried again for ever
            return _without_file(job)

    async def _answer(self, job: JobRecord) -> Event | None:
        """None: it was stopped, or cancelled."""
        self._answering = asyncio.create_task(self._answer_in_time(job))
        try:
            await asyncio.wait({self._answering})
            return None if self._answering.cancelled() else self._answering.result()
        finally:
            self._answering.cancel()
            await asyncio.wait({self._answering})
            self._answering = None

    async def _answer_in_time(self, job: JobRecord) -> Event | None:
        try:
            # the wait for a place counts, too
            async with asyncio.timeout(max(0.0, job.expires_at - time.time())), self.shared.jobs:
                await self._answer_all(job)
        except TimeoutError:
            await self._give_up_the_rest(job)
            return TimeUp()
        return None if self.shared.stopping.is_set() else AllAnswered()

    async def _answer_all(self, job: JobRecord) -> None:
        done = set(await patiently(self.shared.store.lines_done, job.id))
        async with asyncio.TaskGroup() as group:
            async for line in lines_of(self.shared.store, job.input_file_id):
                if line.number in done:
                    continue
                size = len(line.text or b"")
                await self.shared.room.enter(size)
                if self.shared.stopping.is_set():
                    self.shared.room.leave(size)
                    return
                running = group.create_task(self._answer_one(job, batch_line(line)))
                running.add_done_callback(partial(self._leave, size))

    def _leave(self, size: int, _: asyncio.Task[None]) -> None:
        self.shared.room.leave(size)

    async def _answer_one(self, job: JobRecord, line: BatchLine) -> None:
        answer = await self._ask(job, line)
        await self._put(line, answered(line, answer))

    async def _ask(self, job: JobRecord, line: BatchLine) -> Answer:
        config = self.shared.config
        pause_s, num_failed = config.retry_s, 0
        while True:
            answer = await self.shared.ask(job.endpoint, line.body, job.expires_at)
            num_failed += answer.status >= 500 and answer.status not in _NOT_TAKEN
            is_for_good = answer.status < 500 and answer.status not in _NOT_TAKEN
            if is_for_good or num_failed == config.max_num_tries:
                return answer
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, config.max_retry_s)

    async def _give_up_the_rest(self, job: JobRecord) -> None:
        done = set(await patiently(self.shared.store.lines_done, job.id))
        async for line in lines_of(self.shared.store, job.input_file_id):
            if line.number not in done:
                found = batch_line(line)
                await self._put(found, too_late(found))
                self.shared.on_late()

    async def _put(self, line: BatchLine, result: LineResult) -> None:
        await patiently(self.shared.store.put_result, self.lease, line.number, result)


def _without_file(job: JobRecord) -> Invalid:
    return Invalid([Problem("file_not_found", f"file {job.input_file_id} is gone")])


async def cancel_job(store: Store, job: JobRecord) -> JobRecord:
    """As it is then; unchanged, if it is too late for that. Raises StoreAway."""
    while True:
        changed = after(job, CancelAsked(), int(time.time()))
        if changed is job or await store.replace_job(job, changed, None):
            return changed
        job = await store.job(job.id) or job
