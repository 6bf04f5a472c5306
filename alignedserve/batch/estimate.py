"""When jobs will be done. The functions are pure.

Work is counted in tokens of prompts. How many of them a generated token is worth differs tenfold between systems, and
with how many run at a time: where prompts and answers did not grow alike, the time that they took says it. What is left
of a job is judged by what is done of it: its prompts by bytes and lines, its answers by lines or by bytes, whichever
was the better measure so far. Jobs that run at a time share what the system does of them: each begins a line in turn
(concurrency_limit.py), so that each has as many lines done in a second. While windows are tight they don't take turns,
which is not played: it lasts only until turns would do again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

# A generated token takes so many times as long as a prompt's token, as long as nothing else is seen: on GPUs five to
# ten times, with the demo model on two CPU cores two to 27 times.
USUAL_OUTPUT_WORK = 10.0
# It is not believed to be so many times more, or less.
_MOST_UNUSUAL = 10.0
# How much what is seen has to say, to be believed, as a share of all that was seen. Tuned on a job of the demo model
# whose prompts grow tenfold, and on one whose lines are alike.
_DOUBT = 1e-4


@dataclass(frozen=True)
class Done:
    """What is done of a job."""

    num_lines: int = 0
    # The bytes of these lines in the input file.
    num_bytes: int = 0
    # The tokens of prompts that were computed, without those whose KV was there.
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def prompt_work(self) -> int:
        # Lines that are refused cost something, too.
        return self.num_lines + self.num_prompt_tokens

    def work(self, output_work: float = USUAL_OUTPUT_WORK) -> float:
        return self.prompt_work + output_work * self.num_output_tokens


class Sample(NamedTuple):
    """What was done in all until then."""

    at_s: float
    prompt_work: float
    num_output_tokens: float


@dataclass(frozen=True)
class Job:
    """A job that runs, or waits for a place."""

    # The lines, and the bytes, of its input.
    num_lines: int
    num_bytes: int
    # What was done of it over time, the latest last.
    history: Sequence[Done] = (Done(),)

    @property
    def done(self) -> Done:
        return self.history[-1]

    def work_left(self, work_per_byte: float, output_work: float = USUAL_OUTPUT_WORK) -> float:
        """`work_per_byte` is that of other jobs, for one of which nothing is done."""
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
class Estimate:
    # The seconds until all lines are done; None: it is not known yet how fast jobs are.
    left_s: float | None
    # The share of the work that is done, from 0 to 1.
    progress: float


def estimates(
    running: Sequence[Job],
    waiting: Sequence[Job],
    num_places: int,
    speed: float | None,
    work_per_byte: float,
    output_work: float = USUAL_OUTPUT_WORK,
) -> list[Estimate]:
    """Returns the estimates of all, those that run first. `waiting` are in the order in which they begin; `speed` is
    the work of all jobs in a second."""
    jobs = [*running, *waiting]
    done = [job.done.work(output_work) for job in jobs]
    left = [job.work_left(work_per_byte, output_work) for job in jobs]
    times: Sequence[float | None] = [None] * len(jobs)
    if speed:
        # So much work each of their lines is.
        shares = [
            (before + after) / max(1, job.num_lines)
            for job, before, after in zip(jobs, done, left, strict=True)
        ]
        times = _times(left, shares, len(running), num_places, speed)
    found = zip(done, left, times, strict=True)
    return [Estimate(time_s, _share(before, after)) for before, after, time_s in found]


def speed_of(samples: Sequence[Sample], output_work: float = USUAL_OUTPUT_WORK) -> float | None:
    """Returns the work in a second: the slope of the line through all samples, since lines that began together end
    together, and between two ends of such waves nothing seems to be done."""
    if len(samples) < 2:
        return None
    times = _from_mean([each.at_s for each in samples])
    works = _from_mean([each.prompt_work + output_work * each.num_output_tokens for each in samples])
    spread, rise = _dot(times, times), _dot(times, works)
    return rise / spread if spread > 0 and rise > 0 else None


def output_work_of(samples: Sequence[Sample]) -> float:
    """Returns how many tokens of prompts a generated one is worth: least squares of the times by both, held at what is
    usual as long as they grow too much alike to be told apart."""
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
    """Plays what will happen: whenever one of those that run is done, the next one begins."""
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
        # What is left of one that is done may not be quite nothing.
        running = [each for each in running if works[each] > 1e-6 * left[each]]
    return times


def _prompts_fit(history: Sequence[Done]) -> tuple[float, float]:
    """Returns the tokens of prompts that came with each byte of lines, and those that came with each line besides:
    below 0, for not all that is written in a line is prompt."""
    steps = [*pairwise([Done(), *history])]
    return _fit(
        [new.num_prompt_tokens - old.num_prompt_tokens for old, new in steps],
        [new.num_bytes - old.num_bytes for old, new in steps],
        [new.num_lines - old.num_lines for old, new in steps],
    )


def _are_like_bytes(history: Sequence[Done]) -> bool:
    """Returns whether the length of answers went more with the bytes of lines than with their number."""
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
    """Returns by what `first` and `second` are multiplied to be `target` together, by least squares: with nothing of
    the second as long as the two are too much alike to be told apart."""
    both, with_doubt = _dot(first, second), (1 + _DOUBT) * _dot(second, second)
    by_first, by_second = _dot(first, target), _dot(second, target)
    # Squares of the smallest numbers are zero.
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
