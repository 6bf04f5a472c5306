"""Workloads: which requests arrive when, and their lengths, read from a trace of the Azure format or synthetic. See
jsonl_trace.py for the other formats.

A workload is a list of arrivals in order of time, with the first at 0.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# The fields that a line of JSON needs in a trace, in our format and in Mooncake's.
OWN_FIELDS = ("arrival_s", "prompt_len", "output_len")
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length")


def quoted(names: Iterable[str]) -> str:
    """Returns the names of fields for an error. Without quotes, some would be taken for names of options."""
    return ", ".join(map(repr, names))


# The part of an error that names what each format needs.
MUST_HOLD = (
    f"must hold {quoted(AZURE_COLUMNS)} (CSV, as Azure's), {quoted(OWN_FIELDS)} (.jsonl), "
    f"or {quoted(MOONCAKE_FIELDS)} (.jsonl, as Mooncake's)"
)


@dataclass(frozen=True, slots=True)
class Lengths:
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Arrival:
    time_s: float
    lengths: Lengths
    # "rt" or "be": see messages.Request.
    tier: str = "rt"
    # Seconds after its arrival until a best-effort request is due; None: never.
    window_s: float | None = None
    # The objective between two tokens of a real-time request, in seconds; None: the objective of all.
    tbt_s: float | None = None
    # The same for its first token.
    ttft_s: float | None = None
    # Ids of its prompt's pieces of `model.TOKENS_PER_ID` tokens. Prompts with equal first ids share that prefix.
    hash_ids: tuple[int, ...] = ()


def read_azure_trace(path: Path) -> list[Arrival]:
    """Reads a trace in the format of github.com/Azure/AzurePublicDataset, "LLM inference traces"."""
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        columns = rows.fieldnames or ()
        if not set(AZURE_COLUMNS) <= set(columns):
            raise ValueError(f"{path}: has columns {quoted(columns) or '(none)'}: {MUST_HOLD}")
        read = [_azure_row(row, f"{path}, line {rows.line_num}") for row in rows]
    if not read:
        raise ValueError(f"{path}: holds no requests")
    start = min(time for time, _ in read)
    arrivals = [Arrival((time - start).total_seconds(), lengths) for time, lengths in read]
    return sorted(arrivals, key=lambda arrival: arrival.time_s)


def _azure_row(row: dict[str, str], where: str) -> tuple[datetime, Lengths]:
    try:
        time = datetime.fromisoformat(row["TIMESTAMP"])
    except (TypeError, ValueError):
        raise ValueError(f"{where}: TIMESTAMP={row['TIMESTAMP']!r}: must be a date and a time") from None
    return time, Lengths(_count(row, "ContextTokens", where), _count(row, "GeneratedTokens", where))


def _count(row: dict[str, str], column: str, where: str) -> int:
    text = row[column]
    if text is None or not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{where}: {column}={text!r}: must be an integer, at least 1")
    return int(text)


def rate_of(workload: Sequence[Arrival]) -> float:
    """Returns the requests per second, from the first to the last."""
    span = workload[-1].time_s - workload[0].time_s if workload else 0.0
    if span <= 0:
        raise ValueError(f"workload of {len(workload)} requests in {span} s: has no rate")
    return (len(workload) - 1) / span


def scale_rate(workload: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Returns the same requests in the same rhythm, at `rate` per second on average."""
    stretch = rate_of(workload) / _above_zero("rate", rate)
    return [replace(arrival, time_s=arrival.time_s * stretch) for arrival in workload]


def cut(
    workload: Sequence[Arrival], num_requests: int | None = None, seconds: float | None = None
) -> list[Arrival]:
    """Returns the first requests."""
    kept = workload if seconds is None else [each for each in workload if each.time_s < seconds]
    return list(kept[:num_requests])


def poisson_arrivals(lengths: Iterable[Lengths], rate: float, seed: int) -> list[Arrival]:
    """Returns independent arrivals, `rate` per second on average."""
    return gamma_arrivals(lengths, rate, cv=1.0, seed=seed)


def gamma_arrivals(lengths: Iterable[Lengths], rate: float, cv: float, seed: int) -> list[Arrival]:
    """Returns arrivals with gaps of a Gamma distribution. Its deviation is `cv` times its mean: 1 is Poisson, more is
    burstier."""
    _above_zero("rate", rate)
    shape = 1 / _above_zero("cv", cv) ** 2
    generator, time_s, arrivals = random.Random(seed), 0.0, []
    for each in lengths:
        time_s += (
            generator.expovariate(rate) if cv == 1 else generator.gammavariate(shape, 1 / (rate * shape))
        )
        arrivals.append(Arrival(time_s, each))
    return arrivals


def mixed(*workloads: Sequence[Arrival]) -> list[Arrival]:
    """Merges the workloads in order of time."""
    together = [arrival for workload in workloads for arrival in workload]
    return sorted(together, key=lambda arrival: arrival.time_s)


@dataclass(frozen=True)
class LognormalLengths:
    """Lengths: half are below the median, and a sixth above median * spread."""

    median_prompt: float
    median_output: float
    spread: float = 2.5
    max_prompt: int = 16_384
    max_output: int = 2_048

    def sample(self, num_requests: int, seed: int) -> list[Lengths]:
        generator, sigma = random.Random(seed), math.log(_above_zero("spread", self.spread))
        mu_prompt = math.log(_above_zero("median_prompt", self.median_prompt))
        mu_output = math.log(_above_zero("median_output", self.median_output))

        def length(mu: float, longest: int) -> int:
            return min(max(round(generator.lognormvariate(mu, sigma)), 1), longest)

        return [
            Lengths(length(mu_prompt, self.max_prompt), length(mu_output, self.max_output))
            for _ in range(num_requests)
        ]


def _above_zero(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value}: must be above 0")
    return value
