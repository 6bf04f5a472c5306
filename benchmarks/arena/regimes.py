"""Scenarios drawn from numbers: traffic, rate, instances and objectives. Pure.

A scenario is a call of `alignedserve simulate`, so each can be repeated on its own: see configs.py.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random

from alignedserve.cli.simulate.config import SimConfig
from alignedserve.scheduling.policies import POLICIES
from benchmarks.arena.baselines import path_of
from benchmarks.arena.configs import Drawn, Objectives, config_of
from benchmarks.arena.fitting import Layout

# Numbers of prefill, decode and colocated instances.
LAYOUTS = (
    *(Layout(0, 0, count) for count in (1, 2, 4, 8)),
    *(Layout(1, 1, 0), Layout(2, 1, 0), Layout(1, 2, 0), Layout(3, 1, 0)),
    *(Layout(1, 3, 0), Layout(2, 2, 0), Layout(4, 4, 0)),
)
# Published fits (DistServe's), and models on an H200 whose times are worked out from its figures.
MACHINES = ("opt-13b/a100-80gb", "opt-66b/a100-80gb-tp4", "qwen3-30b-a3b/h200", "mixtral-8x7b/h200")
SPREADS = (1.0, 1.5, 2.2, 3.0)
KERNELS = (*8 * ("balanced",), "plain", "padded")
OBJECTIVES: tuple[Objectives, ...] = ("none", "loose", "tight", "tight", "mixed", "infeasible")
BEST_EFFORT = ("none", "none", "share", "windows", "backlog")
POOLS = ("roomy", "roomy", "small")
PREDICTORS = ("none", "rough", "rough", "exact")
# Durations of iterations, as multiples of what policies expect, because cost models are inexact.
PACES = (1.0, 1.0, 1.0, 1.0, 0.7, 1.3)
# Loads of real time and best effort together, as multiples of the capacity. A backlog fills what real time leaves.
LOADS = (0.05, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)
LOADS_BESIDE_BACKLOG = (0.05, 0.3, 0.5, 0.7, 0.9)
# The value of `bursts` for a trace, which has its own.
TRACED = "traced"


@dataclass(frozen=True, kw_only=True)
class Regime(Drawn):
    config: SimConfig

    @property
    def is_overloaded(self) -> bool:
        return self.load > 1.0

    @property
    def has_objectives(self) -> bool:
        """Whether real time can be late."""
        return self.objectives != "none"

    @property
    def is_feasible(self) -> bool:
        """Whether real time can be in time, and can be late."""
        return self.objectives not in ("none", "infeasible")

    def command(self, policies: Sequence[str]) -> str:
        """Returns the command that repeats the scenario."""
        words = ["alignedserve simulate"]
        default = SimConfig()
        for field in fields(SimConfig):
            value = getattr(self.config, field.name)
            if field.name == "policy" or value == getattr(default, field.name):
                continue
            values = value if isinstance(value, tuple) else (value,)
            words += [f"--{field.name.replace('_', '-')} {shlex.quote(str(each))}" for each in values]
        return " ".join([*words, *(f"--policy {path_of(each)}" for each in policies)])


# ---- names of regimes -----------------------------------------------------------------------------------------------

# The dimensions that distinguish regimes in tables and plots.
DIMENSIONS = (
    *("layout_name", "machine", "attention", "lengths", "load", "bursts", "objectives", "best_effort"),
    *("pool", "predictor", "pace"),
)
# Dimensions that `with_values` can set, whatever a number draws.
CAN_BE_SET = ("load", "objectives", "best_effort", "attention", "pool", "predictor", "pace")
# Values that no number draws. A tiny pool has room for one request of the greatest length, and refuses blocks.
ONLY_GIVEN = {"pool": ("tiny",)}
# The most numbers that are tried in a search for scenarios of a regime.
_MOST_TRIED = 20_000


def values_of(dimension: str, traces: Sequence[Path] = ()) -> list[str]:
    """Returns the possible values of a dimension. Raises ValueError if the dimension does not exist."""
    return [*_known(dimension, traces)]


def _known(dimension: str, traces: Sequence[Path]) -> dict[str, object]:
    """Returns a dimension's values by name."""
    known: dict[str, Sequence[object]] = {
        "layout_name": LAYOUTS,
        "machine": MACHINES,
        "attention": KERNELS,
        "lengths": [*(f"spread {each:g}" for each in SPREADS), *(each.stem for each in traces)],
        "load": sorted({*LOADS, *LOADS_BESIDE_BACKLOG}),
        "bursts": ("even", "bursts", *([TRACED] if traces else [])),
        "objectives": OBJECTIVES,
        "best_effort": BEST_EFFORT,
        "pool": POOLS,
        "predictor": PREDICTORS,
        "pace": PACES,
    }
    if dimension not in known:
        raise ValueError(f"regime={dimension!r}: must be one of {', '.join(DIMENSIONS)}")
    return {as_text(value): value for value in known[dimension]}


def as_text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def value_of(drawn: Drawn, dimension: str) -> str:
    return as_text(getattr(drawn, dimension))


def wanted_regime(
    words: Sequence[str], traces: Sequence[Path] = (), may_be_given: bool = False
) -> dict[str, str]:
    """Parses words like `objectives=tight`. Raises ValueError for values that do not exist. `may_be_given`: those that
    no number draws exist as well."""
    wanted = {}
    for word in words:
        dimension, _, value = word.partition("=")
        known = [*values_of(dimension, traces), *(ONLY_GIVEN.get(dimension, ()) if may_be_given else ())]
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
    """Returns the numbers of the next scenarios with these values, from `first` on. Raises ValueError if there are too
    few."""
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
    if not regime:
        return True
    drawn = dice_of(number, traces)
    return all(value_of(drawn, dimension) == value for dimension, value in regime.items())


# ---- draws ----------------------------------------------------------------------------------------------------------


def draw(
    number: int,
    traces: Sequence[Path] = (),
    policies: Sequence[str] = tuple(POLICIES),
    given: Mapping[str, str] | None = None,
) -> Regime:
    """Returns the scenario with this number. With traces, which must always have the same order, a quarter of the
    scenarios take arrivals and lengths from one. `given`: values by dimension that replace the drawn ones. Raises
    ValueError for a negative number, a dimension that can't be given, or a trace without a request that fits."""
    drawn = with_values(dice_of(number, traces), given or {})
    found = _config_of(drawn)
    paths = tuple(map(path_of, policies))
    names = {field.name: getattr(drawn, field.name) for field in fields(Drawn)}
    return Regime(**names, config=replace(found, policy=paths))


@cache
def _config_of(drawn: Drawn) -> SimConfig:
    return config_of(drawn)


def with_values(drawn: Drawn, given: Mapping[str, str]) -> Drawn:
    """Raises ValueError for an unknown dimension or value, or for a dimension that is derived from others."""
    for dimension, value in given.items():
        known = _known(dimension, ())
        known |= {each: each for each in ONLY_GIVEN.get(dimension, ())}
        if dimension not in CAN_BE_SET:
            raise ValueError(f"given: {dimension}={value!r}: only {', '.join(CAN_BE_SET)} can be given")
        if value not in known:
            raise ValueError(f"given: {dimension}={value!r}: must be one of {', '.join(known)}")
        drawn = replace(drawn, **{dimension: known[value]})  # type: ignore[arg-type]
    return drawn


def dice_of(number: int, traces: Sequence[Path]) -> Drawn:
    """Returns what a number draws. A new draw must come after the others, so that existing scenarios stay the same."""
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
    pool, predictor = dice.choice(POOLS), dice.choice(PREDICTORS)
    be_prompt, be_output = _log_uniform(dice, 200, 4000), _log_uniform(dice, 30, 300)
    begin_at, pace = dice.random(), dice.choice(PACES)
    trace = traces[int(trace_at * len(traces))] if traces and is_of_trace else None
    return Drawn(
        number=number,
        machine=machine,
        layout=layout,
        attention=attention,
        lengths=trace.stem if trace else f"spread {spread:g}",
        load=load,
        bursts=TRACED if trace else "bursts" if burstiness < 1 else "even",
        objectives=objectives,
        best_effort=best_effort,
        pool=pool,
        predictor=predictor,
        pace=pace,
        trace=trace,
        begin_at=begin_at,
        prompt=prompt,
        output=output,
        spread=spread,
        burstiness=1.0 if trace else burstiness,
        be_share=be_share,
        windows=windows,
        be_prompt=be_prompt,
        be_output=be_output,
    )


def _log_uniform(dice: Random, low: float, high: float) -> float:
    return math.exp(dice.uniform(math.log(low), math.log(high)))
