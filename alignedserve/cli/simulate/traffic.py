"""The traffic of `alignedserve simulate`: traced or synthetic requests, their classes, and the lengths of a backlog."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from alignedserve.cli.simulate.config import SimConfig
from alignedserve.sim.jsonl_trace import read_trace
from alignedserve.sim.trace import Arrival, Lengths, LognormalLengths, cut, gamma_arrivals, scale_rate

# Requests per second of synthetic traffic without a given rate.
RATE = 1.0
_NUM_BACKLOG_LENGTHS = 4096
_LONGEST = 1 << 24


def make_traffic(config: SimConfig) -> list[Arrival]:
    if config.trace is not None:
        arrivals = at_rate(_traced(config, Path(config.trace)), config.request_rate)
    else:
        arrivals = _made(config)
    if config.be_share is not None:
        arrivals = _with_classes(arrivals, config.be_share, _seed(config, 2))
    if config.objectives:
        arrivals = _with_objectives(arrivals, config.objectives, f"objectives {config.seed}")
    if config.be_window_s is not None:
        arrivals = [
            each if each.tier == "rt" else replace(each, window_s=config.be_window_s) for each in arrivals
        ]
    return arrivals


def _traced(config: SimConfig, path: Path) -> list[Arrival]:
    """Returns the requests from `trace_start` on, with the first at 0."""
    arrivals = read_trace(path)
    if config.trace_start >= len(arrivals):
        raise ValueError(
            f"trace_start={config.trace_start}: {path} holds {len(arrivals)} requests, counted from 0"
        )
    kept = cut(arrivals[config.trace_start :], config.num_prompts)
    return [replace(each, time_s=each.time_s - kept[0].time_s) for each in kept]


def at_rate(arrivals: list[Arrival], rate: float | None) -> list[Arrival]:
    """Scales the arrivals to the rate; None: leaves them as they are. A single request has no rate."""
    return arrivals if rate is None or len(arrivals) == 1 else scale_rate(arrivals, rate)


def make_backlog(config: SimConfig, traffic: Sequence[Arrival]) -> list[Lengths]:
    if config.trace is not None and config.be_input_len is None and config.be_output_len is None:
        return [each.lengths for each in traffic]
    prompt, output = config.be_input_len or config.input_len, config.be_output_len or config.output_len
    return _lengths(prompt, output, config.spread).sample(_NUM_BACKLOG_LENGTHS, _seed(config, 3))


def _made(config: SimConfig) -> list[Arrival]:
    lengths = _lengths(config.input_len, config.output_len, config.spread)
    made = lengths.sample(config.num_prompts, _seed(config, 0))
    arrivals = gamma_arrivals(made, RATE, config.burstiness**-0.5, _seed(config, 1))
    # Only the rhythm of arrivals is random: the rate is set exactly.
    arrivals = [replace(each, time_s=each.time_s - arrivals[0].time_s) for each in arrivals]
    return at_rate(arrivals, config.request_rate or RATE)


def _lengths(prompt: float, output: float, spread: float) -> LognormalLengths:
    """Returns the distribution of lengths. Requests that are too long for the model are left out later, and counted."""
    return LognormalLengths(prompt, output, spread, _LONGEST, _LONGEST)


def _with_classes(arrivals: list[Arrival], be_share: float, seed: int) -> list[Arrival]:
    """Makes exactly this share of the requests best effort, in random order."""
    num_be = round(len(arrivals) * be_share)
    tiers = ["be"] * num_be + ["rt"] * (len(arrivals) - num_be)
    random.Random(seed).shuffle(tiers)
    return [replace(each, tier=tier) for each, tier in zip(arrivals, tiers, strict=True)]


def _with_objectives(
    arrivals: Sequence[Arrival], objectives: Sequence[tuple[float, float]], seed: str
) -> list[Arrival]:
    """Gives the objectives to real-time requests in exactly these shares, in random order."""
    real_time = [index for index, each in enumerate(arrivals) if each.tier == "rt"]
    random.Random(seed).shuffle(real_time)
    found, start, share = list(arrivals), 0, 0.0
    for tbt_s, share_of_it in objectives:
        share += share_of_it
        end = round(len(real_time) * share)
        for index in real_time[start:end]:
            found[index] = replace(found[index], tbt_s=tbt_s)
        start = end
    return found


def _seed(config: SimConfig, what: int) -> int:
    """Returns a seed. Lengths, arrivals and classes have independent seeds."""
    return 4 * config.seed + what
