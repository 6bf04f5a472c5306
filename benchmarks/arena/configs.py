"""Turns a scenario into a call of `alignedserve simulate`. Rates, objectives, windows and memory are derived from the
capacity and the duration of requests there (fitting.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from alignedserve.cli.simulate.compare import MAX_MODEL_LEN
from alignedserve.cli.simulate.config import SimConfig
from alignedserve.cli.simulate.traffic import make_traffic
from alignedserve.sim.jsonl_trace import read_trace
from alignedserve.sim.trace import Lengths
from alignedserve.timing.cost import CostModel
from alignedserve.timing.cost_presets import load_cost_model
from benchmarks.arena.fitting import Fitting, Layout

Objectives = Literal["none", "loose", "tight", "mixed", "infeasible"]

# The least real-time requests, and the most requests of both classes.
NUM_REAL_TIME, MOST_REQUESTS = 240, 1200
# Requests arrive for as long as this many answers take, so that batches fill. Otherwise the instances might hold all
# requests at once, and no load would matter.
NUM_ANSWERS = 3


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The values drawn by a scenario's number. See `regimes.DIMENSIONS` for the names."""

    number: int
    machine: str
    layout: Layout
    attention: str
    lengths: str
    # A multiple of the capacity.
    load: float
    bursts: str
    objectives: Objectives
    best_effort: str
    pool: str
    predictor: str
    # Duration of iterations, as a multiple of what policies expect.
    pace: float

    # The trace of arrivals and lengths, if any, and the position in it, as a share, where they begin.
    trace: Path | None
    begin_at: float
    # Median tokens, and their spread.
    prompt: float
    output: float
    spread: float
    burstiness: float
    # Share of best-effort requests, if they arrive with the others.
    be_share: float
    # Length of their windows, as a multiple of an answer's duration.
    windows: float
    # Median tokens of a backlog.
    be_prompt: float
    be_output: float

    @property
    def layout_name(self) -> str:
        return str(self.layout)


def config_of(drawn: Drawn) -> SimConfig:
    """Returns the scenario's configuration. Raises ValueError if no request fits on an instance."""
    cost = load_cost_model(drawn.machine).with_attention(drawn.attention)  # type: ignore[arg-type]
    # As much real time as without best effort.
    num_requests = round(NUM_REAL_TIME / (1 - _be_share(drawn)))
    made = _without_times(drawn, cost, num_requests)
    found, share = _fitting(drawn, cost, made)
    in_flight = drawn.load * found.rate * found.answer_s
    num_requests = min(max(num_requests, math.ceil(NUM_ANSWERS * in_flight)), MOST_REQUESTS)
    made = _without_times(drawn, cost, num_requests)
    found, share = _fitting(drawn, cost, made)
    # Requests that are too long are left out, so the rate of all is higher.
    rate = drawn.load * found.rate / share
    answer_s, wanted = drawn.pace * found.answer_s, wanted_of(drawn.objectives, found, drawn.pace)
    return replace(
        made,
        request_rate=_rounded(rate / drawn.pace),
        be_window_s=_rounded(drawn.windows * answer_s) if drawn.best_effort == "windows" else None,
        warmup_s=_rounded(min(30.0, 3 * answer_s)) if drawn.best_effort == "backlog" else 30.0,
        slo_ttft_ms=_rounded(1000 * wanted.ttft_s),
        slo_tbt_ms=_rounded(1000 * wanted.tbt_s),
        slo_mix=wanted.mix,
    )


def _be_share(drawn: Drawn) -> float:
    return drawn.be_share if drawn.best_effort in ("share", "windows") else 0.0


def _fitting(drawn: Drawn, cost: CostModel, config: SimConfig) -> tuple[Fitting, float]:
    """Returns the capacity, and the share of requests that fit on an instance. Raises ValueError if none does."""
    lengths = _lengths(config)
    longest = min(MAX_MODEL_LEN, cost.num_kv_tokens)
    fitting = [each for each in lengths if each.prompt + each.output <= longest]
    if not fitting:
        raise ValueError(
            f"{drawn.trace or drawn.lengths}: each of {len(lengths)} requests is longer than {longest} tokens"
        )
    return Fitting(cost, drawn.layout, fitting), len(fitting) / len(lengths)


def _without_times(drawn: Drawn, cost: CostModel, num_requests: int) -> SimConfig:
    layout, has_backlog = drawn.layout, drawn.best_effort == "backlog"
    return SimConfig(
        cost=drawn.machine,
        attention=drawn.attention,
        prefill_instances=(layout.num_prefill,) if layout.num_prefill else (),
        decode_instances=(layout.num_decode,) if layout.num_decode else (),
        colocated_instances=(layout.num_colocated,) if layout.num_colocated else (),
        pace=drawn.pace,
        trace=str(drawn.trace) if drawn.trace else None,
        trace_start=_start(drawn.trace, num_requests, drawn.begin_at) if drawn.trace else 0,
        num_prompts=num_requests,
        burstiness=drawn.burstiness,
        input_len=round(drawn.prompt),
        output_len=round(drawn.output),
        spread=drawn.spread,
        seed=drawn.number,
        be_share=_be_share(drawn),
        be_backlog=64 * (layout.num_decode or layout.num_colocated) if has_backlog else 0,
        be_input_len=round(drawn.be_prompt) if has_backlog else None,
        be_output_len=round(drawn.be_output) if has_backlog else None,
        pool_memory_bytes=_pool_bytes(drawn.pool, cost, layout),
        length_predictor=drawn.predictor,
    )


def _lengths(config: SimConfig) -> Sequence[Lengths]:
    if config.trace is None:
        return [each.lengths for each in make_traffic(config)]
    return _traced(Path(config.trace))[config.trace_start :][: config.num_prompts]


@cache
def _traced(trace: Path) -> list[Lengths]:
    return [each.lengths for each in read_trace(trace)]


def _start(trace: Path, num_requests: int, share: float) -> int:
    """Returns the index of the first request. Each position with enough requests after it is equally likely."""
    return int(share * (max(0, len(_traced(trace)) - num_requests) + 1))


def _pool_bytes(pool: str, cost: CostModel, layout: Layout) -> int | None:
    """Returns the pool's size; None: as large as it is by default. A small pool is half of the decode instances' KV. A
    tiny one is the longest request that one of them holds, which is also the least."""
    held = cost.num_kv_tokens * cost.kv_bytes_per_token
    least = 1.01 * min(held, MAX_MODEL_LEN * cost.kv_bytes_per_token)
    half = 0.5 * (layout.num_decode or layout.num_colocated) * held
    return {"tiny": int(least), "small": int(max(half, least))}.get(pool)


@dataclass(frozen=True)
class Wanted:
    """Objectives in seconds; 0 means none."""

    ttft_s: float
    tbt_s: float
    mix: str | None = None


def wanted_of(objectives: Objectives, found: Fitting, pace: float) -> Wanted:
    """Returns the objectives. Tight: 1.5 times a full batch's iteration, and three times a prompt's time in full
    iterations. Infeasible: less than a request takes alone."""
    full_s, first_s = pace * found.full_s, pace * found.first_among_others_s
    alone_s, first_alone_s = pace * found.alone_s, pace * found.first_s
    # If answers have one token, there is no time between two. Any number will do.
    full_s = full_s or alone_s
    tight, loose = Wanted(3 * first_s + full_s, 1.5 * full_s), Wanted(10 * first_s + full_s, 5 * full_s)
    match objectives:
        case "none":
            return Wanted(0.0, 0.0)
        case "loose":
            return loose
        case "tight":
            return tight
        case "mixed":
            mix = f"{_rounded(tight.tbt_s)}:0.3,{_rounded(loose.tbt_s)}:0.7"
            return Wanted(loose.ttft_s, loose.tbt_s, mix)
        case "infeasible":
            return Wanted(0.5 * first_alone_s, 0.5 * alone_s)


def _rounded(value: float) -> float:
    """Rounds to three digits, for readable commands."""
    return float(f"{value:.3g}")
