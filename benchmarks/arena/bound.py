"""What is possible in a scenario: a bound on the share of real time in time. Pure.

It is that of a machine without iterations, which divides itself among requests without loss. It knows all lengths and
arrivals. A prompt takes what it adds to full iterations, and an answer its share of full batches of mixed lengths
(`fitting.py`), so memory and slots count on average only. A policy that runs answers of similar length together could
need less than that.

A request can't be in time if it would be late alone. What must be done within a span of time, because it comes and is
due there, must also fit there. Otherwise at least as many requests are late as it takes to remove the excess, if the
largest are removed. Spans that follow each other are counted together. On separate prefill and decode instances, the
kind with more late requests counts.

Runs are short: above the capacity more is in time than would be possible for long.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from alignedserve.cli.simulate.compare import MAX_MODEL_LEN
from alignedserve.cli.simulate.traffic import make_traffic
from alignedserve.sim.trace import Arrival
from alignedserve.timing.cost_presets import load_cost_model
from benchmarks.arena.fitting import MAX_NUM_BATCHED_TOKENS, Fitting
from benchmarks.arena.regimes import Regime

# Sums of seconds are not exact.
_LITTLE_S = 1e-9


@dataclass(frozen=True)
class Part:
    """A request's work on one kind of instance."""

    # The index of its request.
    number: int
    begins_s: float
    due_s: float
    seconds: float


@cache
def possible(regime: Regime) -> float:
    """Returns the share of real time that can be in time; 1 if there is none, or none can be late."""
    config, layout = regime.config, regime.layout
    cost = load_cost_model(regime.machine).with_attention(regime.attention)  # type: ignore[arg-type]
    longest = min(MAX_MODEL_LEN, cost.num_kv_tokens)
    every = (each for each in make_traffic(config) if each.tier == "rt")
    asked = [each for each in every if each.lengths.prompt + each.lengths.output <= longest]
    if not asked or not regime.has_objectives:
        return 1.0
    fitting = Fitting(cost, layout, [each.lengths for each in asked])
    prompts, answers = list[Part](), list[Part]()
    for number, each in enumerate(asked):
        alone_s, token_s = _alone_s(fitting, each, regime.pace)
        first_due_s, tbt_s = _wanted(regime, each)
        due_s, num_decodes = each.time_s + first_due_s, each.lengths.output - 1
        # A first token that is early makes up for longer gaps.
        if alone_s > first_due_s or alone_s + num_decodes * token_s > first_due_s + num_decodes * tbt_s:
            continue
        seconds = regime.pace * fitting.seconds_of_prompt(each.lengths)
        prompts.append(Part(number, each.time_s, due_s, seconds))
        if num_decodes:
            seconds = regime.pace * num_decodes * fitting.full_s / len(fitting.batch)
            answers.append(Part(number, each.time_s + alone_s, due_s + num_decodes * tbt_s, seconds))
    if layout.num_colocated:
        machines = [(layout.num_colocated, prompts + answers)]
    else:
        machines = [(layout.num_prefill, prompts), (layout.num_decode, answers)]
    num_late = max(num_too_many(speed, parts) for speed, parts in machines)
    return (len(prompts) - num_late) / len(asked)


def _alone_s(fitting: Fitting, asked: Arrival, pace: float) -> tuple[float, float]:
    """Returns the seconds to the first token, and of an iteration, of a request that is alone on its instances."""
    prompt = asked.lengths.prompt
    token_s = fitting.cost.iteration([], [prompt]) if asked.lengths.output > 1 else 0.0
    return pace * fitting.cost.fastest_ttft_s(prompt, MAX_NUM_BATCHED_TOKENS), pace * token_s


def _wanted(regime: Regime, asked: Arrival) -> tuple[float, float]:
    """Returns its objectives, for the first token and between two, in seconds."""
    config = regime.config
    ttft_s = config.slo_ttft_ms / 1000 if asked.ttft_s is None else asked.ttft_s
    return ttft_s, config.slo_tbt_ms / 1000 if asked.tbt_s is None else asked.tbt_s


def num_too_many(speed: float, parts: Sequence[Part]) -> int:
    """Returns how many requests at least are late on a machine of this speed."""
    waiting, num_late, begin_s = sorted(parts, key=lambda part: part.begins_s), 0, -math.inf
    while waiting := [part for part in waiting if part.begins_s >= begin_s]:
        busy = _until_idle(speed, waiting)
        count, due_s = _most_late(speed, busy)
        num_late += count
        # What comes before then and is due later counts in no span.
        begin_s = due_s if count else math.nextafter(busy[-1].begins_s, math.inf)
    return num_late


def _until_idle(speed: float, parts: Sequence[Part]) -> Sequence[Part]:
    """Returns the first parts: those that come before the machine has done all that came so far."""
    done_s = parts[0].begins_s
    for place, part in enumerate(parts):
        if part.begins_s > done_s:
            return parts[:place]
        done_s += part.seconds / speed
    return parts


def _most_late(speed: float, parts: Sequence[Part]) -> tuple[int, float]:
    """Returns how many requests at least are late in the worst span that begins with the first part, and when that span
    ends."""
    begin_s, needed_s, most = parts[0].begins_s, 0.0, (0, math.inf)
    seconds_of, largest = dict[int, float](), list[float]()
    for part in sorted(parts, key=lambda part: part.due_s):
        before_s, seconds = seconds_of.get(part.number, 0.0), part.seconds / speed
        if before_s:
            del largest[bisect_left(largest, -before_s)]
        seconds_of[part.number] = before_s + seconds
        insort(largest, -before_s - seconds)
        needed_s += seconds
        excess_s, count = needed_s - (part.due_s - begin_s) - _LITTLE_S, 0
        while excess_s > 0:
            excess_s += largest[count]
            count += 1
        if count > most[0]:
            most = count, part.due_s
    return most
