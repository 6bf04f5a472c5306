"""Estimates when jobs will be done. The functions are pure.

The unit of work is one prompt token. The cost of a generated token, in prompt tokens, varies tenfold between systems
and with concurrency. It is fitted to the measured times wherever prompts and answers grew at different rates.

A job's remaining work follows from its completed lines. Its prompts are predicted from bytes and lines; its answers
from bytes or lines, whichever predicted better so far.

Running jobs take turns in beginning lines (concurrency_limit.py), so each of them completes the same number of lines
per second. When a completion window is at risk, jobs don't take turns. The estimate ignores that, because it lasts only
until taking turns suffices again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

# Cost of a generated token in prompt tokens, until it has been measured. It was 5 to 10 on GPUs, and 2 to 27 with the
# demo model on two CPU cores.
USUAL_OUTPUT_WORK = 10.0
# Clamp of the measured cost: at most 10 times, and at least 1/10, of the usual one.
_MOST_UNUSUAL = 10.0
# Ridge penalty on the second coefficient, relative to its sum of squares. It keeps that coefficient near 0 while the
# two regressors are almost collinear. Tuned on two jobs of the demo model: one with prompts that grow tenfold, one with
# lines of equal length.
_DOUBT = 1e-4


@dataclass(frozen=True)
class Done:
    """The completed part of a job."""

    num_lines: int = 0
    # The bytes of these lines in the input file.
    num_bytes: int = 0
    # Prompt tokens that were computed, without those from the prefix cache.
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def prompt_work(self) -> int:
        # A refused line costs something, too.
        return self.num_lines + self.num_prompt_tokens

    def work(self, output_work: float = USUAL_OUTPUT_WORK) -> float:
        return self.prompt_work + output_work * self.num_output_tokens


class Sample(NamedTuple):
    """Cumulative work at one point in time."""

    at_s: float
    prompt_work: float
    num_output_tokens: float


@dataclass(frozen=True)
class Job:
    """A job that is running or waiting."""

    # The size of its input.
    num_lines: int
    num_bytes: int
    # Its progress over time, the latest last.
    history: Sequence[Done] = (Done(),)

    @property
    def done(self) -> Done:
        return self.history[-1]

    def work_left(self, work_per_byte: float, output_work: float = USUAL_OUTPUT_WORK) -> float:
        """Returns the remaining work. `work_per_byte` is that of other jobs. It is used while no line is done."""
        done = self.done
        lines_left, bytes_left = self.num_lines - done.num_lines, max(0, self.num_bytes - done.num_bytes)
        if lines_left <= 0:
            return 0.0
        if not done.num_lines:
            return bytes_left * work_per_byte
        by_bytes = bytes_left / max(1, done.num_bytes)
        by_lines = lines_left / done.num_lines
        by_answers = by_bytes if _are_like_bytes(self.history) else by_lines
        per_byte, per_line = _prompts_fit(self.history)
        prompts = max(0.0, bytes_left * per_byte + lines_left * per_line)
        answers = done.num_output_tokens * by_answers
        return lines_left + prompts + output_work * answers


@dataclass(frozen=True)
class JobEstimate:
    # Seconds until all lines are done; None while the speed is unknown.
    left_s: float | None
    # The completed share of the work, from 0 to 1.
    progress: float


def estimates(
    running: Sequence[Job],
    waiting: Sequence[Job],
    num_places: int,
    speed: float | None,
    work_per_byte: float,
    output_work: float = USUAL_OUTPUT_WORK,
) -> list[JobEstimate]:
    """Returns an estimate per job, the running ones first. `waiting` is in the order in which the jobs will begin.
    `speed` is the work that all jobs together do per second."""
    jobs = [*running, *waiting]
    done = [job.done.work(output_work) for job in jobs]
    left = [job.work_left(work_per_byte, output_work) for job in jobs]
    times: Sequence[float | None] = [None] * len(jobs)
    if speed:
        # Mean work per line, by job.
        shares = [
            (before + after) / max(1, job.num_lines)
            for job, before, after in zip(jobs, done, left, strict=True)
        ]
        times = _times(left, shares, len(running), num_places, speed)
    found = zip(done, left, times, strict=True)
    return [JobEstimate(time_s, _share(before, after)) for before, after, time_s in found]


def speed_of(samples: Sequence[Sample], output_work: float = USUAL_OUTPUT_WORK) -> float | None:
    """Returns the work per second: the slope of a regression over all samples. A difference of two samples would not
    do, because lines that began together end together, with no progress in between."""
    if len(samples) < 2:
        return None
    times = _from_mean([each.at_s for each in samples])
    works = _from_mean([each.prompt_work + output_work * each.num_output_tokens for each in samples])
    spread, rise = _dot(times, times), _dot(times, works)
    return rise / spread if spread > 0 and rise > 0 else None


def output_work_of(samples: Sequence[Sample]) -> float:
    """Returns the cost of a generated token in prompt tokens, by least squares over the measured times. It stays near
    the usual cost while prompts and answers grow too similarly to be distinguished."""
    if len(samples) < 3:
        return USUAL_OUTPUT_WORK
    times = _from_mean([each.at_s for each in samples])
    answers = _from_mean([USUAL_OUTPUT_WORK * each.num_output_tokens for each in samples])
    works = [
        prompt + answer
        for prompt, answer in zip(_from_mean([each.prompt_work for each in samples]), answers, strict=True)
    ]
    usual, extra = _fit(times, works, answers)
    if usual <= 0:
        return USUAL_OUTPUT_WORK * (_MOST_UNUSUAL if extra > 0 else 1)
    return USUAL_OUTPUT_WORK * min(max(1 + extra / usual, 1 / _MOST_UNUSUAL), _MOST_UNUSUAL)


def _from_mean(values: Sequence[float]) -> list[float]:
    mean = sum(values) / len(values)
    return [value - mean for value in values]


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum(map(operator.mul, first, second))


def _times(
    left: Sequence[float], shares: Sequence[float], num_running: int, num_places: int, speed: float
) -> list[float]:
    """Simulates the queue: whenever a job ends, the next one begins. Returns the seconds until each job is done."""
    times, works = [0.0] * len(left), list(left)
    running, next_one, now_s = list(range(num_running)), num_running, 0.0
    while running or next_one < len(works):
        while len(running) < max(1, num_places) and next_one < len(works):
            running.append(next_one)
            next_one += 1
        total = sum(shares[each] for each in running)
        speeds = {each: speed * shares[each] / total if total else speed for each in running}
        step_s = min(works[each] / speeds[each] if works[each] else 0.0 for each in running)
        now_s += step_s
        for each in running:
            works[each] -= speeds[each] * step_s
            times[each] = now_s
        # Rounding may leave a little work of a completed job.
        running = [each for each in running if works[each] > 1e-6 * left[each]]
    return times


def _prompts_fit(history: Sequence[Done]) -> tuple[float, float]:
    """Returns the prompt tokens per byte of a line, and the additional prompt tokens per line. The latter is negative,
    because not all of a line is prompt."""
    steps = [*pairwise([Done(), *history])]
    return _fit(
        [new.num_prompt_tokens - old.num_prompt_tokens for old, new in steps],
        [new.num_bytes - old.num_bytes for old, new in steps],
        [new.num_lines - old.num_lines for old, new in steps],
    )


def _are_like_bytes(history: Sequence[Done]) -> bool:
    """Returns whether bytes of lines predict the length of answers better than the number of lines does."""
    steps = [
        (
            new.num_lines - old.num_lines,
            new.num_bytes - old.num_bytes,
            new.num_output_tokens - old.num_output_tokens,
        )
        for old, new in pairwise([Done(), *history])
    ]
    last = history[-1]
    per_line = last.num_output_tokens / last.num_lines
    per_byte = last.num_output_tokens / max(1, last.num_bytes)
    off_by_lines = sum((num_tokens - lines * per_line) ** 2 for lines, _, num_tokens in steps)
    off_by_bytes = sum((num_tokens - num_bytes * per_byte) ** 2 for _, num_bytes, num_tokens in steps)
    return off_by_bytes < off_by_lines


def _fit(target: Sequence[float], first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Returns the two coefficients of the least-squares fit of `target` by `first` and `second`. The second coefficient
    is close to 0 while the regressors are too collinear."""
    both, with_doubt = _dot(first, second), (1 + _DOUBT) * _dot(second, second)
    by_first, by_second = _dot(first, target), _dot(second, target)
    # Squares of the smallest numbers underflow to zero.
    square = _dot(first, first)
    scale = square * with_doubt - both * both
    if scale <= 0:
        return (by_first / square if square else 0.0), 0.0
    return (
        (by_first * with_doubt - by_second * both) / scale,
        (by_second * _dot(first, first) - by_first * both) / scale,
    )


def _share(done: float, left: float) -> float:
    return done / (done + left) if done else 0.0
