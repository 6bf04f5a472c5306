"""Figures of cases and their evaluation. Pure; in seconds and tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from statistics import median
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from alignedserve.bench.client import RequestOutcome
from alignedserve.sim.report import quantiles

# RT's largest allowed ratio, and BE's smallest.
MOST_OF_RT, LEAST_OF_BE = 1.25, 0.85
# The largest share of tokens that may share a piece of the stream with another token. A busy machine sends two at once
# now and then; a server that does so by design would hide gaps.
MOST_JOINED = 0.1
# Least probability with which the interval of a median contains the true one.
CONFIDENCE = 0.95
PREFIX = "alignedserve:"

Row = dict[str, Any]
# (name, labels) -> value.
Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass(frozen=True)
class Case:
    """One case of one policy in one round."""

    num_rt: int = 0
    ttft_p50_s: float = 0.0
    ttft_p99_s: float = 0.0
    # Between two tokens of a request.
    gap_p50_s: float = 0.0
    gap_p99_s: float = 0.0
    # Share of RT requests that met their objectives; None if they had none.
    attainment: float | None = None
    rt_tokens_per_s: float = 0.0
    be_tokens_per_s: float = 0.0
    # Share of the decode instances' time in which they compute.
    busy: float = 0.0

    def as_row(self) -> Row:
        return asdict(self)

    @staticmethod
    def of(row: Mapping[str, Any]) -> Case:
        return Case(**{field.name: row[field.name] for field in fields(Case)})


@dataclass(frozen=True)
class Worth:
    """Ratios of one round: RT beside BE to RT alone, and BE beside RT to its expectation."""

    ttft_p50: float
    ttft_p99: float
    gap_p99: float
    be_by_time: float
    be_by_tokens: float


def worth(rt: Case, be: Case, mix: Case) -> Worth:
    return Worth(
        ttft_p50=_ratio(mix.ttft_p50_s, rt.ttft_p50_s),
        ttft_p99=_ratio(mix.ttft_p99_s, rt.ttft_p99_s),
        gap_p99=_ratio(mix.gap_p99_s, rt.gap_p99_s),
        be_by_time=_ratio(mix.be_tokens_per_s, be.be_tokens_per_s * (1 - rt.busy)),
        be_by_tokens=_ratio(mix.be_tokens_per_s, be.be_tokens_per_s - mix.rt_tokens_per_s),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def worths(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Worth]]:
    """Returns (part, place, policy) -> the ratios of each round with all three cases."""
    cases: dict[tuple[str, str, str, int], dict[str, Case]] = {}
    for row in rows:
        if "case" in row and row["case"] in ("rt", "be", "mix") and "error" not in row:
            key = row["part"], row["place"], row["policy"], row["round"]
            cases.setdefault(key, {})[row["case"]] = Case.of(row)
    found: dict[tuple[str, str, str], list[Worth]] = {}
    for (part, place, policy, _), by_name in cases.items():
        if len(by_name) == 3:
            found.setdefault((part, place, policy), []).append(worth(**by_name))
    return found


def middle(all_worths: Sequence[Worth]) -> Worth:
    """Returns the medians of the rounds' ratios."""
    return Worth(
        **{field.name: median(getattr(each, field.name) for each in all_worths) for field in fields(Worth)}
    )


def interval(all_worths: Sequence[Worth]) -> tuple[Worth, Worth] | None:
    """Returns the range that contains the true median of each ratio with at least 95 % confidence, for any
    distribution; None if there are too few rounds."""
    rank = _lowest_rank(len(all_worths))
    if rank is None:
        return None
    ordered = [sorted(getattr(each, field.name) for each in all_worths) for field in fields(Worth)]
    return Worth(*(values[rank] for values in ordered)), Worth(*(values[-1 - rank] for values in ordered))


def _lowest_rank(count: int) -> int | None:
    """Returns the highest index from either end of `count` ordered values between which the median lies with the
    required confidence. Each value is below the median with probability 1/2."""
    outside, rank = 0.0, None
    for index in range(count // 2):
        outside += 2 * math.comb(count, index) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        rank = index
    return rank


def gaps_of(times_s: Sequence[float]) -> list[float]:
    return [later - sooner for sooner, later in pairwise(times_s)]


def is_kept(outcome: RequestOutcome, ttft_s: float, tbt_s: float) -> bool:
    """Returns whether every token arrived by its due time, as in `Deadlines`: an early token delays no later due
    time."""
    if outcome.error is not None or not outcome.times_s:
        return False
    first_due_s = outcome.due_s + ttft_s
    return all(time_s <= first_due_s + k * tbt_s for k, time_s in enumerate(outcome.times_s))


def real_time(
    outcomes: Sequence[RequestOutcome],
    slo_s: tuple[float, float] | None,
    window_s: float,
    may_join: bool = False,
) -> Case:
    """Returns the case without BE's figures. Raises RuntimeError if a request was not answered, or too many tokens have
    no time of their own. After a piece with several tokens, the others are held to earlier due times than their own."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise RuntimeError(f"real-time request due at {outcome.due_s:.2f} s: {outcome.error}")
        if not 0 < len(outcome.times_s) <= outcome.output_len:
            raise RuntimeError(f"{outcome.output_len} tokens came in {len(outcome.times_s)} pieces")
    num_tokens = sum(outcome.output_len for outcome in outcomes)
    num_pieces = sum(len(outcome.times_s) for outcome in outcomes)
    # The token that ends an answer may have no text.
    if not may_join and num_tokens - num_pieces > len(outcomes) + MOST_JOINED * num_tokens:
        raise RuntimeError(f"{num_tokens} tokens came in {num_pieces} pieces")
    ttft_s = quantiles([outcome.times_s[0] - outcome.due_s for outcome in outcomes])
    gap_s = quantiles([gap for outcome in outcomes for gap in gaps_of(outcome.times_s)])
    kept = None if slo_s is None else sum(is_kept(each, *slo_s) for each in outcomes) / len(outcomes)
    return Case(
        num_rt=len(outcomes),
        ttft_p50_s=ttft_s.p50,
        ttft_p99_s=ttft_s.p99,
        gap_p50_s=gap_s.p50,
        gap_p99_s=gap_s.p99,
        attainment=kept,
        rt_tokens_per_s=num_tokens / window_s,
    )


def objectives_s(rt: Case) -> tuple[float, float]:
    """Returns RT's largest allowed TTFT and TBT, in whole milliseconds."""
    return tuple(max(math.ceil(MOST_OF_RT * value * 1e3), 1) / 1e3 for value in (rt.ttft_p99_s, rt.gap_p99_s))  # type: ignore[return-value]


# ---- /metrics -------------------------------------------------------------------------------------------------------


def parse_metrics(text: str) -> Samples:
    return {
        (name.removeprefix(PREFIX), frozenset(labels.items())): value
        for family in text_string_to_metric_families(text)
        for name, labels, value, *_ in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    """Returns the sum over all samples with these labels, whatever their other labels. Raises KeyError if there are
    none."""
    wanted = set(labels.items())
    found = [value for (each, has), value in samples.items() if each == name and wanted <= has]
    if not found:
        raise KeyError(f"{name} {labels}")
    return sum(found)


def difference(before: Samples, after: Samples, name: str, **labels: str) -> float:
    return total(after, name, **labels) - total(before, name, **labels)


# ---- outputs --------------------------------------------------------------------------------------------------------


def num_needed(prompt_len: int, output_len: int) -> int:
    """Returns the number of a request's tokens that need KV: all but the last."""
    return prompt_len + output_len - 1


def num_different(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """Returns the number of keys with different values, or with a value on one side only."""
    return sum(one.get(key) != other.get(key) for key in {*one, *other})
