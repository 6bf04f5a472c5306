"""One stage of one job. The holder of the job's lease runs it from its current state until it is stopped.

Progress is kept only in the store, so another holder can continue. A line's answer is also the mark that the line is
done: a line may run twice but is answered once. The store records each line's start as well, so a line that kills its
process does not run for ever.
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
from alignedserve.batch.parse import LineProblem, Parsed, Wrong
from alignedserve.batch.placed_inputs import InputChanged
from alignedserve.batch.reader import LineReader
from alignedserve.batch.results import (
    BatchLine,
    LineAnswer,
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
    JobId,
    JobRecord,
    Lease,
    LineResult,
    Problem,
    Stage,
    Store,
    StoreFull,
)
from alignedserve.store.retry import retried

# Calls the endpoint and returns its answer. Arguments: endpoint, body as JSON, deadline on time.time()'s clock, the
# job's owner, and whether jobs would be late. An invalid body does not raise.
Ask = Callable[[str, bytes, float, str, bool], Awaitable[LineAnswer]]

# Statuses that are retried without limit: the line was not accepted.
_NOT_TAKEN = (429, 503)


@dataclass(frozen=True)
class JobHooks:
    # Called for each line that missed its deadline.
    on_late: Callable[[], None] = lambda: None
    # Called for each job that has ended.
    on_over: Callable[[JobRecord], None] = lambda job: None
    # Returns the deliveries that announce such a job.
    deliveries_of: Callable[[JobRecord], Sequence[Delivery]] = lambda job: ()


@dataclass(frozen=True)
class Shared:
    """What all jobs of a gateway share."""

    store: Store
    # Stores the content of new files.
    contents: Contents
    inputs: Inputs
    ask: Ask
    # Returns whether jobs would be late at their present speed.
    are_late: Callable[[], bool]
    # The first one applies to lines without a model.
    served_models: Sequence[str]
    config: BatchConfig
    # The limit on running lines.
    limit: ConcurrencyLimit
    # The turns in which files are read.
    turns: LoopTurns
    reader: LineReader
    # Once it is set, no more lines begin.
    stopping: asyncio.Event
    hooks: JobHooks


def stage_of(job: JobRecord) -> Stage:
    if job.status == "validating":
        return "validate"
    return "run" if job.status == "in_progress" and time.time() < job.expires_at else "end"


@dataclass(eq=False)
class JobRun:
    shared: Shared
    lease: Lease
    stage: Stage
    # Numbers of the lines that are about to begin.
    _coming: list[int] = field(default_factory=list, init=False)
    _beginning: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    # The task that processes the job's file.
    _working: asyncio.Task[Event | None] | None = field(default=None, init=False)

    async def run(self) -> None:
        """Runs until the job has ended or reached another stage, or until the gateway stops. Raises LeaseLost, alone or
        in a group."""
        store = self.shared.store
        while not self.shared.stopping.is_set():
            job = await retried(store.job, JobId(self.lease.id))
            # An ended job may have been deleted.
            if job is None or job.is_over or stage_of(job) != self.stage:
                return
            event, files = await self._next(job)
            if event is not None:
                changed = after(job, event, int(time.time()))
                # If the job has changed, it was cancelled meanwhile. The next round handles that.
                told = self.shared.hooks.deliveries_of(changed) if changed.is_over else ()
                is_done = await retried(store.replace_job, job, changed, self.lease, files, told)
                if is_done and changed.is_over:
                    self.shared.hooks.on_over(changed)

    def cancel(self) -> None:
        """Stops the work on the file of a job that is being cancelled. No more lines begin. Safe to repeat."""
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
        """Does the work and returns its event, or None if the work was stopped or cancelled. An error that would repeat
        for ever fails the job."""
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

    async def _found(self, line: Line) -> Parsed | Wrong:
        try:
            return await self.shared.reader.parsed(line)
        except LineProblem as error:
            return error.wrong

    async def _answer_in_time(self, job: JobRecord) -> Event | None:
        try:
            async with asyncio.timeout(max(0.0, job.expires_at - time.time())):
                await self._answer_all(job)
        except TimeoutError:
            async for line in self._unanswered(job):
                await self._put(job, line, too_late(line), is_bounded=False)
                self.shared.hooks.on_late()
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
        """Records that the line begins, in the order of the calls. Lines that arrive during a write are recorded
        together in the next one."""
        self._coming.append(number)
        async with self._beginning:
            if number in self._coming:
                lines, self._coming = self._coming, []
                await retried(self.shared.store.begin_lines, self.lease, lines)

    async def _ask(self, job: JobRecord, line: BatchLine) -> LineAnswer:
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
        """Answers each remaining line with an error that says it was cancelled. Does nothing if the file was never
        validated or is gone."""
        if job.in_progress_at is None:
            return
        with contextlib.suppress(FileGone):
            async for line in self._unanswered(job):
                await self._put(job, line, cancelled(line), is_bounded=False)

    async def _unanswered(self, job: JobRecord) -> AsyncIterator[BatchLine]:
        """Yields the lines without a result. The file must be validated."""
        done = await retried(self.shared.store.lines_done, job.id)
        async for line in self._lines(job, done):
            yield await self._batch_line(job, line)

    async def _lines(self, job: JobRecord, done: Collection[int] = ()) -> AsyncIterator[Line]:
        """Yields the lines that are not in `done`."""
        async for line in lines_of(self.shared.inputs.chunks(job), self.shared.turns):
            if line.number not in done:
                yield line

    async def _batch_line(self, job: JobRecord, line: Line) -> BatchLine:
        """Returns the line's parts. The file must be validated."""
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
    """Returns the job after the cancellation; unchanged if it is too late to cancel it. Raises StoreAway."""
    while True:
        changed = after(job, CancelAsked(), int(time.time()))
        if changed is job or await store.replace_job(job, changed, None):
            return changed
        found = await store.job(job.id)
        if found is None:
            # It had ended, and was deleted.
            return job
        job = found
