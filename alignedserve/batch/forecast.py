"""Follows the jobs of a gateway and predicts when they will be done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from alignedserve.batch.estimate import (
    USUAL_OUTPUT_WORK,
    Done,
    Job,
    JobEstimate,
    Sample,
    estimates,
    output_work_of,
    speed_of,
)
from alignedserve.store import JobId, JobRecord, Store, Tally

# The most waiting jobs with an estimate.
MAX_NUM_WAITING = 32
# Bounds of the sampling window, in seconds. The speed is measured over the later half of the time since jobs began to
# run. With less than ENOUGH_S seconds there is no estimate.
MIN_WINDOW_S, MAX_WINDOW_S, ENOUGH_S = 10.0, 1800.0, 3.0
# The most entries of a job's history. When it is full, every other entry is dropped.
_NUM_STEPS = 32
# Seconds for which another gateway's estimates are valid.
HEARD_S = 10.0
# Jobs are late if they would take more than this share of the time until they expire. Beside the chats of
# benchmarks/results/llmd_protocol.md, urgent jobs run a quarter faster, which makes up for the rest.
IN_TIME = 0.8


@dataclass
class _Watched:
    num_lines: int
    num_bytes: int
    # On time.time()'s clock.
    expires_at: float
    # Its progress over time, the latest last.
    history: list[Done]
    # When the first of its lines was completed here.
    since_s: float | None = None

    def add(self, done: Done) -> tuple[int, int]:
        """Adds an entry. Returns the increases since the last call: prompt work, and output tokens."""
        before = self.history[-1]
        if done.num_lines > before.num_lines:
            if len(self.history) == _NUM_STEPS:
                # The last entry stays.
                del self.history[-2::-2]
            self.history.append(done)
        return (
            max(0, done.prompt_work - before.prompt_work),
            max(0, done.num_output_tokens - before.num_output_tokens),
        )

    @property
    def job(self) -> Job:
        return Job(self.num_lines, self.num_bytes, self.history)


class JobForecast:
    def __init__(
        self, store: Store, num_places: int, clock: Callable[[], float] = lambda: time.time()
    ) -> None:
        """`num_places` is the number of jobs that run at the same time."""
        self._store = store
        self._num_places = num_places
        self._clock = clock
        self._watched: dict[JobId, _Watched] = {}
        # The estimates of the last look, and its time.
        self._found: dict[JobId, JobEstimate] = {}
        self._found_s = 0.0
        # `goes_by_window`: a running job would be late if jobs took turns, so the one that expires first goes first.
        # `are_late`: a job would be late even then.
        self.goes_by_window = self.are_late = False
        # The estimates of other gateways and when they arrived, by gateway.
        self._heard: dict[str, tuple[float, Mapping[str, tuple[float | None, float]]]] = {}
        # Samples since jobs began to run, but at most twice `MAX_WINDOW_S`.
        self._samples: deque[Sample] = deque()
        self._prompt_work = self._num_output_tokens = 0
        # These keep their last values while no jobs run.
        self._speed: float | None = None
        self._output_work = USUAL_OUTPUT_WORK
        self._work_per_byte = 0.0

    def of(self, job_id: JobId) -> JobEstimate | None:
        """Returns the estimate as of now; None for a job that neither runs nor is among the next ones."""
        if job_id in self._found:
            return _aged(self._found[job_id], self._clock() - self._found_s)
        for heard_s, elsewhere in self._heard.values():
            age_s = self._clock() - heard_s
            if job_id in elsewhere and age_s < HEARD_S:
                return _aged(JobEstimate(*elsewhere[job_id]), age_s)
        return None

    def said(self) -> dict[str, tuple[float | None, float]]:
        """Returns what is sent to other gateways: per job, the seconds until it is done, if known, and its completed
        share."""
        age_s = self._clock() - self._found_s
        aged = {job_id: _aged(found, age_s) for job_id, found in self._found.items()}
        return {job_id: (each.left_s, each.progress) for job_id, each in aged.items()}

    def hear(self, gateway: str, said: Mapping[str, tuple[float | None, float]]) -> None:
        self._heard[gateway] = self._clock(), said

    async def look(self, running: Sequence[JobId]) -> None:
        """Updates the progress and the estimates. Raises StoreAway."""
        waiting: list[JobId] = []
        if running:
            ids = await self._store.open_jobs("run", MAX_NUM_WAITING + len(running))
            waiting = [each for each in ids if each not in running][:MAX_NUM_WAITING]
        await self._add_done(running)
        await self._watch([*running, *waiting])
        if running:
            self._estimate(running, waiting)
        else:
            self._found, self.goes_by_window, self.are_late = {}, False, False
            self._samples.clear()

    async def _add_done(self, running: Sequence[JobId]) -> None:
        """Counts the progress of running jobs, and of those that have just ended."""
        for job_id, watched in self._watched.items():
            if job_id in running or watched.since_s is not None:
                prompt_work, num_output_tokens = watched.add(_done(await self._store.tally(job_id)))
                self._prompt_work += prompt_work
                self._num_output_tokens += num_output_tokens
                if prompt_work and watched.since_s is None:
                    watched.since_s = self._clock()

    async def _watch(self, job_ids: Sequence[JobId]) -> None:
        for gone in self._watched.keys() - set(job_ids):
            del self._watched[gone]
        for job_id in job_ids:
            if job_id not in self._watched and (job := await self._store.job(job_id)):
                # Its earlier progress says nothing about the present speed.
                done = _done(await self._store.tally(job_id))
                self._watched[job_id] = _Watched(
                    job.num_lines, await self._bytes_of(job), job.expires_at, [done]
                )

    async def _bytes_of(self, job: JobRecord) -> int:
        file = await self._store.file(job.input_file_id)
        return file.num_bytes if file else 0

    def _estimate(self, running: Sequence[JobId], waiting: Sequence[JobId]) -> None:
        now = self._clock()
        here, there = (
            {each: self._watched[each] for each in ids if each in self._watched} for ids in (running, waiting)
        )
        self._sample(now, list(here.values()))
        num_bytes = sum(watched.history[-1].num_bytes for watched in here.values())
        if num_bytes:
            works = [watched.history[-1].work(self._output_work) for watched in here.values()]
            self._work_per_byte = sum(works) / num_bytes
        found = estimates(
            [watched.job for watched in here.values()],
            [watched.job for watched in there.values()],
            self._num_places,
            self._speed,
            self._work_per_byte,
            self._output_work,
        )
        self._found, self._found_s = dict(zip((*here, *there), found, strict=True)), now
        self._judge(now, here, there)

    def _judge(self, now: float, here: Mapping[JobId, _Watched], there: Mapping[JobId, _Watched]) -> None:
        late = {
            job_id
            for job_id, watched in (*here.items(), *there.items())
            if (left_s := self._found[job_id].left_s) is not None
            and left_s > IN_TIME * (watched.expires_at - now)
        }
        self.goes_by_window = not late.isdisjoint(here)
        # The order of running jobs does not help a waiting job.
        self.are_late = not late.isdisjoint(there)
        if self.goes_by_window and not self.are_late:
            work = 0.0
            for watched in sorted(here.values(), key=lambda each: each.expires_at):
                work += watched.job.work_left(self._work_per_byte, self._output_work)
                self.are_late |= work > IN_TIME * (watched.expires_at - now) * (self._speed or 0.0)

    def _sample(self, now: float, here: Sequence[_Watched]) -> None:
        since_s = min((watched.since_s for watched in here if watched.since_s is not None), default=now)
        window_s = min(MAX_WINDOW_S, max(MIN_WINDOW_S, (now - since_s) / 2))
        samples = self._samples
        # At first, while the first lines run, nothing is completed.
        if len(samples) == 1 and samples[0].prompt_work == self._prompt_work:
            samples.clear()
        samples.append(Sample(now, self._prompt_work, self._num_output_tokens))
        while samples[0].at_s < now - 2 * MAX_WINDOW_S:
            samples.popleft()
        if now - samples[0].at_s >= ENOUGH_S:
            self._output_work = output_work_of(samples)
            late = [each for each in samples if each.at_s >= now - window_s]
            self._speed = speed_of(late, self._output_work) or self._speed


def _aged(found: JobEstimate, age_s: float) -> JobEstimate:
    return found if found.left_s is None else JobEstimate(max(0.0, found.left_s - age_s), found.progress)


def _done(tally: Tally) -> Done:
    return Done(
        tally.num_completed + tally.num_failed,
        tally.num_line_bytes,
        tally.num_input_tokens - tally.num_cached_tokens,
        tally.num_output_tokens,
    )
