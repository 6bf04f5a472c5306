"""One stage of one job, done by the holder of its lease, from wherever the job is, until it is stopped.

Progress is kept in the store alone, so that another holder goes on from there. A line's answer and the mark that it
has one are the same thing there: a line may run twice, and is answered once. The store also records that a line
begins, so that a line which kills the process that runs it does not run for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from alignedserve.batch.alike import alike_together
from alignedserve.batch.concurrency_limit import ConcurrencyLimit
from alignedserve.batch.config import MAX_LINES_WITH_BLANKS, BatchConfig
from alignedserve.batch.inputs import FileGone, Inputs
from alignedserve.batch.job import AllAnswered, CancelAsked, Event, Invalid, TimeUp, Written, after
from alignedserve.batch.lines import Line, TooManyLines, lines_of
from alignedserve.batch.loop_turns import LoopTurns
from alignedserve.batch.parse import LineProblem, Parsed
from alignedserve.batch.placed_inputs import InputChanged
from alignedserve.batch.reader import LineReader
from alignedserve.batch.results import (
    Answer,
    BatchLine,
    answered,
    cancelled,
    fallen,
    not_stored,
    too_late,
    write_results,
)
from alignedserve.batch.validate import Validator
from alignedserve.store import (
    Contents,
    Delivery,
    FileRecord,
    JobRecord,
    Lease,
    LineResult,
    Problem,
    Stage,
    Store,
    StoreFull,
)
from alignedserve.store.retry import retried

# Calls the endpoint with (endpoint, body as JSON, deadline on time.time()'s clock, the job's owner, whether jobs would
# be done too late) and returns its answer. It does not raise for an invalid body.
Ask = Callable[[str, bytes, float, str, bool], Awaitable[Answer]]

# A line with one of these statuses is tried again, as often as needed.
_NOT_TAKEN = (429, 503)


@dataclass(frozen=True)
class Shared:
    """What all jobs of a gateway have in common."""

    store: Store
    # Where the files that are made get their content.
    contents: Contents
    inputs: Inputs
    ask: Ask
    # Returns whether jobs would be done too late at their present speed.
    are_late: Callable[[], bool]
    # The first is that of lines which name none.
    served_models: Sequence[str]
    config: BatchConfig
    # The limit of lines that run.
    limit: ConcurrencyLimit
    # The turns of jobs that read files.
    turns: LoopTurns
    reader: LineReader
    # Once this is set no line begins any more.
    stopping: asyncio.Event
    # This is called when a line was not answered in time.
    on_late: Callable[[], None]
    # This is called with a job that is over.
    on_over: Callable[[JobRecord], None]
    # Returns the deliveries that tell of the end of a job.
    deliveries_of: Callable[[JobRecord], Sequence[Delivery]]


def stage_of(job: JobRecord) -> Stage:
    if job.status == "validating":
        return "validate"
    return "run" if job.status == "in_progress" and time.time() < job.expires_at else "end"


@dataclass(eq=False)
class JobRun:
    shared: Shared
    lease: Lease
    stage: Stage
    # The numbers of the lines that are about to begin.
    _coming: list[int] = field(default_factory=list, init=False)
    _beginning: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    # The task that works on the job's file.
    _working: asyncio.Task[Event | None] | None = field(default=None, init=False)

    async def run(self) -> None:
        """Runs until the job is in another stage or over, or until everything is stopping. Raises LeaseLost, alone or
        in a group."""
        store = self.shared.store
        while not self.shared.stopping.is_set():
            job = await retried(store.job, self.lease.job_id)
            # One that is over may be deleted.
            if job is None or job.is_over or stage_of(job) != self.stage:
                return
            event, files = await self._next(job)
            if event is not None:
                changed = after(job, event, int(time.time()))
                # If the job has changed it was cancelled meanwhile, which the next round finds.
                told = self.shared.deliveries_of(changed) if changed.is_over else ()
                is_done = await retried(store.finish_job, job, changed, self.lease, files, told)
                if is_done and changed.is_over:
                    self.shared.on_over(changed)

    def cancel(self) -> None:
        """Stops the work on the file, since the job is being cancelled: no more lines begin. Safe to repeat."""
        if self._working:
            self._working.cancel()

    async def _next(self, job: JobRecord) -> tuple[Event | None, Sequence[FileRecord]]:
        match job.status:
            case "validating":
                return await self._of_its_file(self._validate, job), []
            case "in_progress":
                return await self._of_its_file(self._answer_in_time, job), []
            case _:
                if job.status == "cancelling":
                    await self._cancel_the_rest(job)
                files = await write_results(self.shared.store, self.shared.contents, job)
                return Written(files.output_id, files.errors_id), files.all

    async def _of_its_file(
        self, work: Callable[[JobRecord], Coroutine[Any, Any, Event | None]], job: JobRecord
    ) -> Event | None:
        """Does the work and returns its event; None: the work was stopped or cancelled. An error that would repeat for
        ever makes the job fail."""
        try:
            return await self._unless_cancelled(work(job))
        except (FileGone, InputChanged, TooManyLines, ExceptionGroup) as error:
            for kind, problem in _FATAL.items():
                if isinstance(error, kind) or (isinstance(error, ExceptionGroup) and error.subgroup(kind)):
                    return Invalid([problem(job)])
            raise

    async def _unless_cancelled(self, work: Coroutine[Any, Any, Event | None]) -> Event | None:
        self._working = asyncio.create_task(work)
        try:
            await asyncio.wait({self._working})
            return None if self._working.cancelled() else self._working.result()
        finally:
            self._working.cancel()
            await asyncio.wait({self._working})
            self._working = None

    async def _validate(self, job: JobRecord) -> Event:
        validator = Validator(job.endpoint, self.shared.served_models)
        async for line in self._lines(job):
            validator.add(line.number, await self._found(line))
            if validator.is_enough:
                break
        return validator.result()

    async def _found(self, line: Line) -> Parsed | Problem:
        try:
            return await self.shared.reader.parsed(line)
        except LineProblem as error:
            return error.problem

    async def _answer_in_time(self, job: JobRecord) -> Event | None:
        try:
            async with asyncio.timeout(max(0.0, job.expires_at - time.time())):
                await self._answer_all(job)
        except TimeoutError:
            async for line in self._unanswered(job):
                await self._put(job, line, too_late(line), is_bounded=False)
                self.shared.on_late()
            return TimeUp()
        return None if self.shared.stopping.is_set() else AllAnswered()

    async def _answer_all(self, job: JobRecord) -> None:
        done = await retried(self.shared.store.lines_done, job.id)
        falls = await retried(self.shared.store.falls, job.id)
        running: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            async for line in alike_together(self._lines(job, done)):
                is_alone = falls.get(line.number, 0) >= self.shared.config.num_falls_alone
                if is_alone and running:
                    await asyncio.wait(running)
                size = len(line.text or b"")
                await self.shared.limit.acquire(size, job.expires_at)
                if self.shared.stopping.is_set():
                    self.shared.limit.release(size)
                    return
                task = group.create_task(self._answer_one(job, line, falls.get(line.number, 0)))
                running.add(task)
                task.add_done_callback(running.discard)
                task.add_done_callback(partial(self._leave, size))
                if is_alone:
                    await asyncio.wait({task})

    def _leave(self, size: int, _: asyncio.Task[None]) -> None:
        self.shared.limit.release(size)

    async def _answer_one(self, job: JobRecord, line: Line, num_falls: int) -> None:
        found = await self._batch_line(job, line)
        if num_falls >= self.shared.config.max_num_falls:
            await self._put(job, found, fallen(found, num_falls))
            return
        await self._begin(line.number)
        answer = await self._ask(job, found)
        try:
            await self._put(job, found, answered(found, answer))
        except StoreFull:
            await self._put(job, found, not_stored(found), is_bounded=False)

    async def _begin(self, number: int) -> None:
        """Records that the line begins, in the order of the calls; lines that come while others are being recorded are
        recorded together."""
        self._coming.append(number)
        async with self._beginning:
            if number in self._coming:
                lines, self._coming = self._coming, []
                await retried(self.shared.store.begin_lines, self.lease, lines)

    async def _ask(self, job: JobRecord, line: BatchLine) -> Answer:
        config = self.shared.config
        pause_s, num_failed = config.retry_s, 0
        while True:
            answer = await self.shared.ask(
                job.endpoint, line.body, job.expires_at, job.owner, self.shared.are_late()
            )
            num_failed += answer.status >= 500 and answer.status not in _NOT_TAKEN
            is_for_good = answer.status < 500 and answer.status not in _NOT_TAKEN
            if is_for_good or num_failed == config.max_num_tries:
                return answer
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, config.max_retry_s)

    async def _cancel_the_rest(self, job: JobRecord) -> None:
        """Says of the lines that have no answer that they were cancelled. If the file was not validated, or is gone,
        there is nothing to be said of them."""
        if job.in_progress_at is None:
            return
        with contextlib.suppress(FileGone):
            async for line in self._unanswered(job):
                await self._put(job, line, cancelled(line), is_bounded=False)

    async def _unanswered(self, job: JobRecord) -> AsyncIterator[BatchLine]:
        """Yields the lines that have no result yet. The file has been validated."""
        done = await retried(self.shared.store.lines_done, job.id)
        async for line in self._lines(job, done):
            yield await self._batch_line(job, line)

    async def _lines(self, job: JobRecord, done: Collection[int] = ()) -> AsyncIterator[Line]:
        """Yields the lines that are not done."""
        async for line in lines_of(self.shared.inputs.chunks(job), self.shared.turns):
            if line.number not in done:
                yield line

    async def _batch_line(self, job: JobRecord, line: Line) -> BatchLine:
        """Returns the line in parts. Its file has been validated."""
        found = await self.shared.reader.parsed(line)
        assert line.text is not None
        body = line.text[found.start : found.end]
        num_bytes = len(line.text) + len(b"\n")
        return BatchLine(line.number, found.custom_id, body, num_bytes, job.is_message_batch)

    async def _put(
        self, job: JobRecord, line: BatchLine, result: LineResult, is_bounded: bool = True
    ) -> None:
        put, result = self.shared.store.put_result, replace(result, num_line_bytes=line.num_bytes)
        await retried(put, self.lease, job.owner, line.number, result, is_bounded)


def _without_file(job: JobRecord) -> Problem:
    return Problem("file_not_found", f"file {job.input_file_id} is gone")


def _changed(job: JobRecord) -> Problem:
    message = f"{job.input_file_id} is gone, or has changed since the batch was created"
    return Problem("input_changed", message)


def _too_many_lines(_: JobRecord) -> Problem:
    message = f"the file has more than {MAX_LINES_WITH_BLANKS} lines, blank ones among them"
    return Problem("too_many_lines", message)


_FATAL: dict[type[Exception], Callable[[JobRecord], Problem]] = {
    FileGone: _without_file,
    InputChanged: _changed,
    TooManyLines: _too_many_lines,
}


async def cancel_job(store: Store, job: JobRecord) -> JobRecord:
    """Returns the job after the cancellation; unchanged, if it is too late for that. Raises StoreAway."""
    while True:
        changed = after(job, CancelAsked(), int(time.time()))
        if changed is job or await store.replace_job(job, changed, None):
            return changed
        found = await store.job(job.id)
        if found is None:
            # It was over, and is deleted.
            return job
        job = found
