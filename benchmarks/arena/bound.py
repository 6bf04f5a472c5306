"""What is possible in a scenario: the share of real time that a machine without iterations would answer in time. Pure.

The machine knows all lengths. A prompt takes what it adds to full iterations, and an answer its share of full batches
(`fitting.py`). It always computes what is due first, and divides itself without loss. A request is left out if its own
prompt or an iteration for it alone is too long. When others would be late, the request that takes most of what delays
them is left out, until none is (Moore and Hodgson).

It knows neither memory nor slots, neither iterations nor copies, and nothing waits for a pool. So no policy should
reach it. Runs are short: above the capacity it takes in more than would be possible for long.
"""

from __future__ import annotations

import heapq
import math
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
        if alone_s > first_due_s or token_s > tbt_s:
            continue
        due_s, num_decodes = each.time_s + first_due_s, each.lengths.output - 1
        seconds = regime.pace * fitting.seconds_of_prompt(each.lengths)
        prompts.append(Part(number, each.time_s, due_s, seconds))
        if num_decodes:
            seconds = regime.pace * num_decodes * fitting.full_s / len(fitting.batch)
            answers.append(Part(number, each.time_s + alone_s, due_s + num_decodes * tbt_s, seconds))
    if layout.num_colocated:
        machines = [(layout.num_colocated, prompts + answers)]
    else:
        machines = [(layout.num_prefill, prompts), (layout.num_decode, answers)]
    left_out = set[int]()
    for speed, parts in machines:
        left_out |= too_many(speed, [each for each in parts if each.number not in left_out])
    return (len(prompts) - len(left_out)) / len(asked)


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


def too_many(speed: float, parts: Sequence[Part]) -> set[int]:
    """Returns the requests to leave out so that no other is late on a machine of this speed."""
    waiting, left_out = sorted(parts, key=lambda part: part.begins_s), set[int]()
    place = 0
    while place < len(waiting):
        place, late = _next_idle(speed, waiting, place, left_out)
        if late is not None:
            left_out.add(late)
    return left_out


def _next_idle(speed: float, parts: Sequence[Part], first: int, left_out: set[int]) -> tuple[int, int | None]:
    """Computes from part `first` on, when the machine is idle, until it is idle again. Returns the next part, and None;
    or `first` again, and the request to leave out, if one would be late."""
    now = parts[first].begins_s
    # What has begun: when it is due, its index, and what is left of it.
    begun, left, taken = list[tuple[float, int]](), dict[int, float](), list[int]()
    place = first
    while True:
        while place < len(parts) and parts[place].begins_s <= now + _LITTLE_S:
            if parts[place].number not in left_out:
                heapq.heappush(begun, (parts[place].due_s, place))
                left[place] = parts[place].seconds / speed
                taken.append(place)
            place += 1
        if not begun:
            return place, None
        due_s, index = begun[0]
        until_s = parts[place].begins_s if place < len(parts) else math.inf
        if now + left[index] > until_s:
            left[index] -= until_s - now
            now = until_s
            continue
        now += left[index]
        heapq.heappop(begun)
        if now > due_s + _LITTLE_S:
            # Only what is due no later has delayed it.
            before = [parts[each] for each in taken if parts[each].due_s <= due_s]
            return first, max(before, key=lambda part: part.seconds).number
