"""The requests and jobs of a whole system's clients, and which of the clients leave, return, or cancel."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from alignedserve.types import RequestKey
from alignedserve.vopr.history import Ask, SubmitJob
from alignedserve.vopr.plan import Plan

# The time for which clients still arrive after the faults, as a share of the plan's duration. They find a recovered
# system.
AFTERWARDS = 0.4
# Approximate numbers of clients.
NUM_CLIENTS = (10, 30, 60)
# The most tokens of an answer: for clients that leave in the middle of a stream, and for others.
_LONG, _SHORT = 120, 40


def make_asking(random: Random, plan: Plan) -> Iterator[Ask | SubmitJob]:
    lasts_s = plan.duration_s * (1 + AFTERWARDS)
    mean_gap_s = lasts_s / random.choice(NUM_CLIENTS)
    batches = random.choice([0.0, 0.05, 0.2])
    leaving = random.choice([0.0, 0.1, 0.5])
    burst_len = random.choice([1, 1, 6])
    at_s, key = 0.0, 0
    while at_s < lasts_s:
        for _ in range(burst_len):
            key += 1
            if random.random() < batches:
                yield _batch(random, RequestKey(key), at_s)
            else:
                yield _ask(random, plan, RequestKey(key), at_s, is_leaving=random.random() < leaving)
        at_s += random.expovariate(1.0 / (mean_gap_s * burst_len))


def _ask(random: Random, plan: Plan, key: RequestKey, at_s: float, is_leaving: bool) -> Ask:
    by_events = random.random() < 0.5
    return Ask(
        at_s=at_s,
        key=key,
        prompt_len=random.randint(1, 150),
        output_len=random.randint(1, _LONG if is_leaving or random.random() < 0.1 else _SHORT),
        is_chat=random.random() < 0.5,
        is_stream=random.random() < 0.7,
        is_flex=random.random() < plan.be_part / 2,
        pause_s=random.choice([0.0, 0.0, 0.5, 5.0]),
        leaves_after=random.randint(1, 30) if is_leaving and by_events else None,
        leaves_after_s=random.choice([0.0, 0.01, 1.0, 8.0, 30.0]) if is_leaving else None,
        is_back_after_s=random.choice([None, None, 0.0, 5.0]) if is_leaving else None,
    )


def _batch(random: Random, key: RequestKey, at_s: float) -> SubmitJob:
    return SubmitJob(
        at_s=at_s,
        key=key,
        num_lines=random.choice([1, 3, 10, 20]),
        prompt_len=random.randint(1, 100),
        output_len=random.choice([2, 10, 40]),
        is_chat=random.random() < 0.3,
        cancels_after_s=random.choice([None, None, 0.0, 1.0, 6.0, 20.0]),
    )
