"""Scenarios drawn from numbers, and their requests. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from alignedserve.bench.workload import choose_tiers
from alignedserve.sim.trace import Arrival, LognormalLengths, gamma_arrivals
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.timing.cost import CostModel
from benchmarks.arena.configs import Objectives, wanted_of
from benchmarks.arena.fitting import Fitting, Layout
from benchmarks.rt_with_be.served import NUM_SLOTS
from benchmarks.sim_vs_live.requests import MAX_TOKENS, Asked, listed

LAYOUTS = (Layout(0, 0, 1), Layout(0, 0, 1), Layout(0, 0, 2), Layout(1, 1, 0))
SPREADS = (1.0, 1.5, 2.2)
OBJECTIVES: tuple[Objectives, ...] = ("loose", "tight", "tight", "mixed")
BEST_EFFORT = ("none", "share", "backlog")
LOADS = (0.3, 0.5, 0.7, 0.9, 1.2)
LOADS_BESIDE_BACKLOG = (0.3, 0.5, 0.7)
# The longest prompt and answer; together they fit the model.
MAX_PROMPT, MAX_OUTPUT = 800, 200
# Fewer requests say little, and more take long to send.
LEAST, MOST = 30, 300
# A machine that is very slow has fewer, so that they arrive within this many seconds.
LONGEST_S = 120.0


@dataclass(frozen=True)
class Scene:
    number: int
    layout: Layout
    # Median tokens, and their spread.
    prompt: float
    output: float
    spread: float
    load: float
    burstiness: float
    objectives: Objectives
    best_effort: str
    be_share: float


def draw(number: int) -> Scene:
    """Returns the scenario with this number. A new draw must come after the others."""
    dice = Random(f"live arena {number}")
    layout, spread, objectives = dice.choice(LAYOUTS), dice.choice(SPREADS), dice.choice(OBJECTIVES)
    prompt, output = _log_uniform(dice, 60, 400), _log_uniform(dice, 15, 80)
    best_effort = dice.choice(BEST_EFFORT)
    load = dice.choice(LOADS_BESIDE_BACKLOG if best_effort == "backlog" else LOADS)
    burstiness, be_share = dice.choice((1.0, 1.0, 0.25)), dice.choice((0.2, 0.5))
    return Scene(
        number,
        layout,
        prompt,
        output,
        spread,
        load,
        burstiness,
        objectives,
        best_effort,
        be_share if best_effort == "share" else 0.0,
    )


def requests_of(
    scene: Scene,
    cost: CostModel,
    pace: float,
    seconds: float,
    tokenizer: Tokenizer,
    longest_s: float = LONGEST_S,
) -> list[Asked]:
    """Returns requests that arrive within about `seconds`, or within `longest_s` if fewer than LEAST do. They are in
    order of time. `pace`: how much longer iterations take than by the cost model."""
    lengths = LognormalLengths(scene.prompt, scene.output, scene.spread, MAX_PROMPT, MAX_OUTPUT)
    rate = Fitting(cost, scene.layout, lengths.sample(LEAST, scene.number), NUM_SLOTS).rate / pace
    count = min(max(LEAST, math.ceil(scene.load * rate * seconds)), MOST)
    sampled = lengths.sample(count, scene.number)
    found = Fitting(cost, scene.layout, sampled, NUM_SLOTS)
    arrivals = gamma_arrivals(
        sampled, scene.load * found.rate / pace, scene.burstiness**-0.5, scene.number + 1
    )
    end_s = arrivals[0].time_s + max(seconds, longest_s)
    arrivals = [each for each in arrivals if each.time_s <= end_s]
    count = len(arrivals)
    tiers = choose_tiers(count, scene.be_share, Random(f"tiers {scene.number}"))
    arrivals = [replace(each, tier=tier) for each, tier in zip(arrivals, tiers, strict=True)]
    if scene.best_effort == "backlog":
        # What real time leaves of the time
        num_be = max(1, round(count * (1 - scene.load) / scene.load))
        begin_s = arrivals[0].time_s
        more = lengths.sample(num_be, scene.number + 2)
        arrivals = [*(Arrival(begin_s, each, "be") for each in more), *arrivals]
    return _asked(arrivals, scene, found, pace, tokenizer)


def count_left_out(scene: Scene, cost: CostModel, pace: float, seconds: float, tokenizer: Tokenizer) -> int:
    """Returns how many requests of real time would come too late to be played. A backlog does not count: there is less
    of it where there is less real time."""

    def num_rt(longest_s: float) -> int:
        asked = requests_of(scene, cost, pace, seconds, tokenizer, longest_s)
        return sum(each.tier == "rt" for each in asked)

    return num_rt(math.inf) - num_rt(LONGEST_S)


def _asked(
    arrivals: Sequence[Arrival], scene: Scene, found: Fitting, pace: float, tokenizer: Tokenizer
) -> list[Asked]:
    wanted = wanted_of(scene.objectives, found, pace)
    tight = wanted_of("tight", found, pace)
    dice = Random(f"requests {scene.number}")
    asked = []
    for each in arrivals:
        is_tight = scene.objectives == "mixed" and dice.random() < 0.3
        tbt_s = tight.tbt_s if is_tight else wanted.tbt_s
        chat = listed(tokenizer, each.lengths.prompt, dice)
        prompt_len = len(tokenizer.chat_ids(chat))
        output = max(2, min(each.lengths.output, MAX_TOKENS - prompt_len))
        asked.append(
            Asked(
                each.time_s - arrivals[0].time_s,
                each.tier,
                chat,
                output,
                prompt_len,
                tbt_s=tbt_s if each.tier == "rt" else None,
                ttft_s=wanted.ttft_s,
            )
        )
    return asked


def _log_uniform(dice: Random, low: float, high: float) -> float:
    return math.exp(dice.uniform(math.log(low), math.log(high)))
