"""Scenarios drawn from numbers: what comes, how fast, on what, and what is asked for. Pure.

A scenario is a call of `alignedserve simulate`, so that any of them can be run again by itself.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean

from alignedserve.scheduling.policies import POLICIES
from alignedserve.sim.compare import MAX_MODEL_LEN
from alignedserve.sim.config import SimConfig
from alignedserve.sim.jsonl_trace import read_trace
from alignedserve.timing.cost import CostModel
from alignedserve.timing.cost_presets import load_cost_model

# The largest batch and the tokens of an iteration that instances have here, as `alignedserve simulate` has them.
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 2048

# Numbers of prefill, decode and colocated instances.
LAYOUTS = (
    *((0, 0, count) for count in (1, 2, 4, 8)),
    *((1, 1, 0), (2, 1, 0), (1, 2, 0), (3, 1, 0), (1, 3, 0), (2, 2, 0), (4, 4, 0)),
)
# Published fits (DistServe's), and grids measured on an H200.
MACHINES = ("opt-13b/a100-80gb", "opt-66b/a100-80gb-tp4", "qwen3-30b-a3b/h200", "mixtral-8x7b/h200")
SPREADS = (1.0, 1.5, 2.2, 3.0)
KERNELS = (*8 * ("balanced",), "plain", "padded")
OBJECTIVES = ("none", "loose", "tight", "tight", "mixed", "infeasible")
BEST_EFFORT = ("none", "none", "share", "windows", "backlog")
PREDICTORS = ("none", "rough", "rough", "exact")
# Loads of real time and best effort together, as shares of what fits; a backlog fills what real time leaves.
LOADS = (0.05, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)
LOADS_BESIDE_BACKLOG = (0.05, 0.3, 0.5, 0.7, 0.9)
NUM_REQUESTS = 240


@dataclass(frozen=True, kw_only=True)
class Regime:
    """`objectives`, `best_effort`, `lengths` and `pool` are names; `load` is a share of what fits."""

    number: int
    machine: str
    layout: tuple[int, int, int]
    attention: str
    lengths: str
    load: float
    bursts: str
    objectives: str
    best_effort: str
    pool: str
    predictor: str
    config: SimConfig

    @property
    def is_overloaded(self) -> bool:
        return self.load > 1.0

    @property
    def layout_name(self) -> str:
        return _layout_name(self.layout)

    def value(self, dimension: str) -> str:
        return _as_text(getattr(self, dimension))

    def command(self, policies: Sequence[str]) -> str:
        """What shows it again."""
        words = ["alignedserve simulate"]
        default = SimConfig()
        for field in fields(SimConfig):
            value = getattr(self.config, field.name)
            if field.name == "policy" or value == getattr(default, field.name):
                continue
            values = value if isinstance(value, tuple) else (value,)
            words += [f"--{field.name.replace('_', '-')} {shlex.quote(str(each))}" for each in values]
        return " ".join([*words, *(f"--policy {each}" for each in policies)])


# What regimes are told apart by, in tables and plots.
DIMENSIONS = (
    *("layout_name", "machine", "attention", "lengths", "load", "bursts", "objectives", "best_effort"),
    *("pool", "predictor"),
)
# Numbers that are tried in a search for scenarios of a regime.
_MOST_TRIED = 20_000


def values_of(dimension: str, traces: Sequence[Path] = ()) -> list[str]:
    """Those that scenarios have there. Raises ValueError for a dimension that does not exist."""
    known: dict[str, Sequence[object]] = {
        "layout_name": [_layout_name(each) for each in LAYOUTS],
        "machine": MACHINES,
        "attention": KERNELS,
        "lengths": [*(f"spread {each:g}" for each in SPREADS), *(each.stem for each in traces)],
        "load": sorted({*LOADS, *LOADS_BESIDE_BACKLOG}),
        "bursts": ("even", "bursts"),
        "objectives": OBJECTIVES,
        "best_effort": BEST_EFFORT,
        "pool": ("roomy", "small"),
        "predictor": PREDICTORS,
    }
    if dimension not in known:
        raise ValueError(f"regime={dimension!r}: must be one of {', '.join(DIMENSIONS)}")
    return list(dict.fromkeys(map(_as_text, known[dimension])))


def wanted_regime(words: Sequence[str], traces: Sequence[Path] = ()) -> dict[str, str]:
    """Reads `objectives=tight` and the like. Raises ValueError for what does not exist."""
    wanted = {}
    for word in words:
        dimension, _, value = word.partition("=")
        known = values_of(dimension, traces)
        if value not in known:
            raise ValueError(f"regime: {dimension}={value!r}: must be one of {', '.join(known)}")
        wanted[dimension] = value
    return wanted


def numbers_of(
    regime: Mapping[str, str],
    first: int,
    count: int,
    traces: Sequence[Path] = (),
    most_tried: int = _MOST_TRIED,
) -> list[int]:
    """The numbers of the next scenarios with these values, from `first` on. Raises ValueError if there are too few."""
    tried = range(first, first + max(count, most_tried)) if regime else range(first, first + count)
    drawn = (number for number in tried if _is_of(regime, number, traces))
    found = list(islice(drawn, count))
    if len(found) < count:
        told = ", ".join(f"{dimension}={value}" for dimension, value in regime.items())
        raise ValueError(
            f"regime {told}: {len(found)} of the scenarios {tried[0]} to {tried[-1]} have it, not {count}"
        )
    return found


def _is_of(regime: Mapping[str, str], number: int, traces: Sequence[Path]) -> bool:
    return not regime or all(draw(number, traces).value(name) == value for name, value in regime.items())


def _as_text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _layout_name(layout: tuple[int, int, int]) -> str:
    num_prefill, num_decode, num_colocated = layout
    return f"{num_colocated} colocated" if num_colocated else f"{num_prefill} + {num_decode}"


def draw(number: int, traces: Sequence[Path] = (), policies: Sequence[str] = tuple(POLICIES)) -> Regime:
    """The scenario of this number. With traces, which have to be given in the same order, a quarter of scenarios take
    arrivals and lengths from one."""
    if number < 0:
        raise ValueError(f"number={number}: scenarios have numbers from 0 on")
    dice = Random(f"arena {number}")
    machine, layout, attention = dice.choice(MACHINES), dice.choice(LAYOUTS), dice.choice(KERNELS)
    prompt, output = _log_uniform(dice, 100, 3000), _log_uniform(dice, 30, 500)
    spread = dice.choice(SPREADS)
    is_of_trace, trace_at = dice.random() < 0.25, dice.random()
    burstiness = dice.choice((1.0, 1.0, 0.25))
    objectives, best_effort = dice.choice(OBJECTIVES), dice.choice(BEST_EFFORT)
    load = dice.choice(LOADS_BESIDE_BACKLOG if best_effort == "backlog" else LOADS)
    be_share, windows = dice.choice((0.2, 0.5, 0.8)), dice.choice((2.0, 10.0))
    pool, predictor = dice.choice(("roomy", "roomy", "small")), dice.choice(PREDICTORS)
    be_prompt, be_output = _log_uniform(dice, 200, 4000), _log_uniform(dice, 30, 300)
    trace = traces[int(trace_at * len(traces))] if traces and is_of_trace else None
    lengths = trace.stem if trace else f"spread {spread:g}"
    cost = load_cost_model(machine).with_attention(attention)  # type: ignore[arg-type]
    longest = min(MAX_MODEL_LEN, cost.num_kv_tokens)
    mean = _mean_lengths(trace, longest, prompt, output, spread)
    sizes = Sizes(cost, mean.prompt, mean.output)
    wanted = _objectives(objectives, sizes)
    # What is too long is left out, and the rate is that of all.
    request_rate = load * sizes.fitting_rate(layout) / mean.share
    answer_s = sizes.answer_s
    config = SimConfig(
        cost=machine,
        attention=attention,
        policy=tuple(policies),
        prefill_instances=(layout[0],) if layout[0] else (),
        decode_instances=(layout[1],) if layout[1] else (),
        colocated_instances=(layout[2],) if layout[2] else (),
        trace=str(trace) if trace else None,
        num_prompts=NUM_REQUESTS,
        request_rate=_rounded(request_rate),
        burstiness=burstiness,
        input_len=round(prompt),
        output_len=round(output),
        spread=spread,
        seed=number,
        be_share=be_share if best_effort in ("share", "windows") else 0.0,
        be_window_s=_rounded(windows * answer_s) if best_effort == "windows" else None,
        be_backlog=64 * max(layout[1], layout[2]) if best_effort == "backlog" else 0,
        be_input_len=round(be_prompt) if best_effort == "backlog" else None,
        be_output_len=round(be_output) if best_effort == "backlog" else None,
        warmup_s=_rounded(min(30.0, 3 * answer_s)) if best_effort == "backlog" else 30.0,
        pool_memory_bytes=sizes.small_pool_bytes(layout) if pool == "small" else None,
        slo_ttft_ms=_rounded(1000 * wanted.ttft_s),
        slo_tbt_ms=_rounded(1000 * wanted.tbt_s),
        slo_mix=wanted.mix,
        length_predictor=predictor,
    )
    return Regime(
        number=number,
        machine=machine,
        layout=layout,
        attention=attention,
        lengths=lengths,
        load=load,
        bursts="bursts" if burstiness < 1 else "even",
        objectives=objectives,
        best_effort=best_effort,
        pool=pool,
        predictor=predictor,
        config=config,
    )


@dataclass(frozen=True)
class Sizes:
    """What requests of mean lengths take on a machine, by its cost model."""

    cost: CostModel
    prompt: float
    output: float

    @property
    def batch(self) -> int:
        """How many decode at a time, at most."""
        return int(max(1, min(MAX_NUM_SEQS, self.cost.num_kv_tokens / (self.prompt + self.output))))

    @property
    def prefill_s(self) -> float:
        return self.cost.fastest_ttft_s(round(self.prompt), MAX_NUM_BATCHED_TOKENS)

    def iteration_s(self, batch: int) -> float:
        return self.cost.iteration([], [round(self.prompt + self.output / 2)] * batch)

    @property
    def decode_s(self) -> float:
        """The share of a full batch's time that a request takes."""
        return self.output * self.iteration_s(self.batch) / self.batch

    @property
    def answer_s(self) -> float:
        """From the arrival to the last token, in a full batch and without waiting."""
        return self.prefill_s + self.output * self.iteration_s(self.batch)

    def fitting_rate(self, layout: tuple[int, int, int]) -> float:
        """Requests per second."""
        num_prefill, num_decode, num_colocated = layout
        if num_colocated:
            return num_colocated / (self.prefill_s + self.decode_s)
        return min(num_prefill / self.prefill_s, num_decode / self.decode_s)

    def small_pool_bytes(self, layout: tuple[int, int, int]) -> int:
        """Half of what decode instances hold, but room for the longest request that one of them holds."""
        num_decoding = layout[1] or layout[2]
        held = self.cost.num_kv_tokens * self.cost.kv_bytes_per_token
        return int(
            max(0.5 * num_decoding * held, 1.01 * min(held, MAX_MODEL_LEN * self.cost.kv_bytes_per_token))
        )


@dataclass(frozen=True)
class Wanted:
    """Objectives in seconds; 0: whenever."""

    ttft_s: float
    tbt_s: float
    mix: str | None = None


def _objectives(name: str, sizes: Sizes) -> Wanted:
    """Tight: what a full batch takes and a half more, and three prompts' time. Infeasible: less than a request alone
    takes."""
    full_s, alone_s, first_s = sizes.iteration_s(sizes.batch), sizes.iteration_s(1), sizes.prefill_s
    tight, loose = Wanted(3 * first_s + full_s, 1.5 * full_s), Wanted(10 * first_s + full_s, 5 * full_s)
    match name:
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
            return Wanted(0.5 * first_s, 0.5 * alone_s)
    raise ValueError(f"objectives={name!r}: must be one of {', '.join(dict.fromkeys(OBJECTIVES))}")


@dataclass(frozen=True)
class _Mean:
    """Mean lengths in tokens, of those requests that an instance holds, and the share of all that these are."""

    prompt: float
    output: float
    share: float = 1.0


def _mean_lengths(trace: Path | None, longest: int, prompt: float, output: float, spread: float) -> _Mean:
    if trace:
        return _mean_lengths_of(trace, longest)
    # The mean of a log-normal distribution with this median.
    over_median = math.exp(math.log(spread) ** 2 / 2)
    return _Mean(prompt * over_median, output * over_median)


@cache
def _mean_lengths_of(trace: Path, longest: int) -> _Mean:
    lengths = [each.lengths for each in read_trace(trace)[:NUM_REQUESTS]]
    fitting = [each for each in lengths if each.prompt + each.output <= longest]
    if not fitting:
        raise ValueError(
            f"{trace}: each of the first {len(lengths)} requests is longer than {longest} tokens"
        )
    return _Mean(
        fmean(each.prompt for each in fitting),
        fmean(each.output for each in fitting),
        len(fitting) / len(lengths),
    )


def _log_uniform(dice: Random, low: float, high: float) -> float:
    return math.exp(dice.uniform(math.log(low), math.log(high)))


def _rounded(value: float) -> float:
    """To three digits, so that commands can be read."""
    return float(f"{value:.3g}")
