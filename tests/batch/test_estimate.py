"""When jobs will be done, in virtual time: plans that are known are carried out, and estimated on the way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alignedserve.batch.estimate import (
    USUAL_OUTPUT_WORK,
    Done,
    Job,
    Sample,
    estimates,
    output_work_of,
    speed_of,
)


@dataclass(frozen=True)
class Line:
    num_bytes: int
    num_output_tokens: int
    # What is written in it besides its prompt.
    num_other_bytes: int = 0

    @property
    def done(self) -> Done:
        num_prompt_tokens = (self.num_bytes - self.num_other_bytes) // 4
        return Done(1, self.num_bytes, num_prompt_tokens, self.num_output_tokens)


@dataclass
class Plan:
    """A job whose lines are done one after the other."""

    lines: Sequence[Line]
    history: list[Done] = field(default_factory=lambda: [Done()])
    # The work that is done of the next line.
    begun: float = 0.0
    end_s: float | None = None

    @cached_property
    def work_of_a_line(self) -> float:
        return sum(line.done.work() for line in self.lines) / len(self.lines)

    @property
    def is_over(self) -> bool:
        return self.history[-1].num_lines == len(self.lines)

    @property
    def job(self) -> Job:
        return Job(len(self.lines), sum(line.num_bytes for line in self.lines), list(self.history))

    def work(self, amount: float, now_s: float) -> None:
        self.begun += amount
        while not self.is_over and self.begun >= (line := self.lines[self.history[-1].num_lines].done).work():
            self.begun -= line.work()
            last = self.history[-1]
            self.history.append(
                Done(
                    *(
                        getattr(last, name) + getattr(line, name)
                        for name in ("num_lines", "num_bytes", "num_prompt_tokens", "num_output_tokens")
                    )
                )
            )
        if self.is_over:
            self.end_s = now_s


def left_of(
    running: Sequence[Job], waiting: Sequence[Job] = (), num_places: int = 8, **known: float
) -> list[float]:
    found = estimates(
        running, waiting, num_places, known.get("speed", 100.0), known.get("work_per_byte", 1.0)
    )
    assert all(each.left_s is not None for each in found)
    return [each.left_s for each in found if each.left_s is not None]


def played(
    plans: Sequence[Plan], num_places: int, speed: float, from_s: float = 0.0, until_s: float = float("inf")
) -> float:
    """Each line of those that run begins in turn, so that each job gets work like that of its lines. Returns when it
    ended."""
    now_s = from_s
    while not all(plan.is_over for plan in plans) and now_s < until_s:
        open_ones = [plan for plan in plans if not plan.is_over][:num_places]
        now_s += 0.1
        works = [plan.work_of_a_line for plan in open_ones]
        for plan, work in zip(open_ones, works, strict=True):
            plan.work(speed * 0.1 * work / sum(works), now_s)
    return now_s


def alike(count: int, num_bytes: int = 400, num_tokens: int = 20) -> list[Line]:
    return [Line(num_bytes, num_tokens)] * count


KINDS = {
    "all alike": alike(200),
    "the long ones last": [Line(200 + 10 * number, 20) for number in range(200)],
    "the long ones first": [Line(2200 - 10 * number, 20) for number in range(200)],
    "answers as long as what is asked": [
        Line(200 + 10 * number, (200 + 10 * number) // 10) for number in range(200)
    ],
    "answers of one length to questions of any": [
        Line(random.Random(number).choice([100, 5000]), 50) for number in range(200)
    ],
    "prompts that grow from next to nothing": [Line(1000 + 20 * number, 2, 1000) for number in range(200)],
}


@pytest.mark.parametrize("lines", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_job_alone(lines: list[Line], share: float) -> None:
    plan, speed = Plan(lines), 500.0
    total_s = sum(line.done.work() for line in lines) / speed
    now_s = played([plan], 1, speed, until_s=share * total_s)
    (left_s,) = left_of([plan.job], speed=speed)
    end_s = played([plan], 1, speed, now_s)
    assert end_s == pytest.approx(total_s, rel=0.02)
    assert left_s == pytest.approx(end_s - now_s, rel=0.2)


def test_jobs_share_and_those_that_wait_begin_when_one_ends() -> None:
    plans, speed = [Plan(alike(count)) for count in (100, 300, 200, 50, 400)], 1000.0
    now_s = played(plans, 2, speed, until_s=10.0)
    assert not any(plan.is_over for plan in plans) and plans[1].history[-1].num_lines
    work_per_byte = plans[0].history[-1].work() / plans[0].history[-1].num_bytes
    jobs = [plan.job for plan in plans]
    left = left_of(jobs[:2], jobs[2:], 2, speed=speed, work_per_byte=work_per_byte)
    played(plans, 2, speed, now_s)
    for plan, left_s in zip(plans, left, strict=True):
        assert plan.end_s is not None and left_s == pytest.approx(plan.end_s - now_s, rel=0.05)


def test_it_is_not_known_before_anything_was_done() -> None:
    (found,) = estimates([Job(10, 1000)], [], 8, None, 0.0)
    assert (found.left_s, found.progress) == (None, 0.0)


def test_what_is_done_is_done() -> None:
    done = Done(10, 1000, 200, 100)
    (found,) = estimates([Job(10, 1000, [done])], [], 8, 50.0, 1.0)
    assert (found.left_s, found.progress) == (0.0, 1.0)


jobs = st.builds(
    lambda lines, share, seed: _part_done(lines, share, seed),
    st.integers(1, 50),
    st.floats(0, 1),
    st.integers(0, 1000),
)


def _part_done(count: int, share: float, seed: int) -> Job:
    chance = random.Random(seed)
    plan = Plan([Line(chance.randint(1, 5000), chance.randint(0, 500)) for _ in range(count)])
    plan.work(share * sum(line.done.work() for line in plan.lines), 0.0)
    return plan.job


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(jobs, min_size=1, max_size=6), st.lists(jobs, max_size=6), st.floats(1, 1e6))
def test_all_work_is_done_when_the_last_job_is(running: list[Job], waiting: list[Job], speed: float) -> None:
    left = left_of(running, waiting, 3, speed=speed)
    work = sum(job.work_left(1.0) for job in [*running, *waiting])
    assert max(left) == pytest.approx(work / speed, rel=1e-3, abs=1e-6)
    assert all(each >= 0 for each in left)
    # More speed makes none later, and one more that waits neither makes any earlier.
    assert all(
        fast <= slow + 1e-9
        for fast, slow in zip(left_of(running, waiting, 3, speed=2 * speed), left, strict=True)
    )
    more = left_of(running, [*waiting, Job(10, 5000)], 3, speed=speed)
    assert all(after >= before * (1 - 1e-9) for before, after in zip(left, more, strict=False))


def test_speed_is_that_of_all_samples() -> None:
    assert speed_of([]) is None
    assert speed_of(samples([(5.0, 3.0)])) is None
    assert speed_of(samples([(0.0, 7.0), (1.0, 7.0), (2.0, 7.0)])) is None
    assert speed_of(samples([(float(at), 30.0 * at + 5) for at in range(10)])) == pytest.approx(30.0)
    # Lines that began together end together, 64 of them each 5 s.
    for phase in range(5):
        waves = [(at / 2, 64.0 * (at // 10)) for at in range(10 + phase, 70 + 2 * phase)]
        assert speed_of(samples(waves)) == pytest.approx(64 / 5, rel=0.1)


def samples(of_prompts: Sequence[tuple[float, float]]) -> list[Sample]:
    return [Sample(at_s, work, 0) for at_s, work in of_prompts]


@pytest.mark.parametrize("output_work", [2.0, 10.0, 30.0])
@pytest.mark.parametrize("num_at_once", [1, 64])
def test_what_a_generated_token_is_worth_shows_where_prompts_grow(
    output_work: float, num_at_once: int
) -> None:
    """Lines end as many at a time as are run at once."""
    chance, lengths = random.Random(1), [20 + number // 20 for number in range(4000)]
    seen, now_s, prompts, answers = [Sample(0.0, 0, 0)], 0.0, 0, 0
    for number, length in enumerate(lengths):
        answer = chance.randint(24, 48)
        prompts, answers = prompts + length, answers + answer
        now_s += (length + output_work * answer) / 10_000
        if not number % num_at_once:
            seen.append(Sample(now_s, prompts, answers))
    assert output_work_of(seen) == pytest.approx(output_work, rel=0.15)
    assert speed_of(seen, output_work) == pytest.approx(10_000, rel=0.02)


def test_where_prompts_and_answers_grow_alike_a_token_is_worth_what_is_usual() -> None:
    chance = random.Random(2)
    alike = [Sample(at + chance.random(), 40.0 * at, 36 * at) for at in range(100)]
    assert output_work_of(alike) == pytest.approx(USUAL_OUTPUT_WORK, rel=0.01)
    # A machine that gets slower all the time makes no token cheaper or dearer.
    slower = [Sample(at + at * at / 100, 40.0 * at, 36 * at) for at in range(100)]
    assert output_work_of(slower) == pytest.approx(USUAL_OUTPUT_WORK, rel=0.01)
    assert output_work_of(alike[:2]) == output_work_of([alike[0]] * 5) == USUAL_OUTPUT_WORK


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.floats(0, 1e6)] * 3), max_size=20))
@example([(0.0, 0.0, 0.0), (0.0, 1e-184, 1e-184), (0.0, 1e-184, 1e-184)])
@example([(0.0, 1e-184, 1e-184), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)])
def test_no_token_is_worth_nothing_or_all(steps: list[tuple[float, float, float]]) -> None:
    """Whatever was seen."""
    sums = [
        Sample(*(sum(step[part] for step in steps[:end]) for part in range(3))) for end in range(len(steps))
    ]
    assert 1.0 <= output_work_of(sums) <= 100.0


def test_two_samples_tell_the_speed_however_close_they_are() -> None:
    assert speed_of(samples([(0.0, 5.0), (0.5, 20.0)])) == pytest.approx(30.0)
    assert speed_of(samples([(10.0, 0.0), (10.5, 0.25)])) == pytest.approx(0.5)
