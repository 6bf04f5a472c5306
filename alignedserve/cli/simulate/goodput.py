"""The highest request rate at which enough requests meet their SLO: raised step by step, then bisected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

# Requests per second.
MAX_RATE = 1e4


@dataclass
class Goodput:
    # Requests per second; 0: even the first rate was too high.
    rate: float = 0.0
    # Every rate that was tried, in requests per second, and the attainment at it.
    tried: list[tuple[float, float]] = field(default_factory=list)


def find_goodput(
    attainment_at: Callable[[float], float],
    first_rate: float,
    target: float = 0.9,
    growth: float = 1.5,
    precision: float = 0.02,
) -> Goodput:
    """Finds the rate; assumes that attainment falls with it. `precision`: relative error of the rate."""
    for name, value, is_allowed, allowed in (
        ("first_rate", first_rate, 0 < first_rate <= MAX_RATE, f"above 0, up to max_rate={MAX_RATE}"),
        ("growth", growth, growth > 1, "above 1"),
        ("precision", precision, precision > 0, "above 0"),
    ):
        if not is_allowed:
            raise ValueError(f"{name}={value}: must be {allowed}")
    found = Goodput()

    def is_good(rate: float) -> bool:
        found.tried.append((rate, attainment_at(rate)))
        return found.tried[-1][1] >= target

    low, high = 0.0, first_rate
    while is_good(high):
        low, high = high, high * growth
        if high > MAX_RATE:
            raise ValueError(f"max_rate={MAX_RATE}: attainment at {low} is still {found.tried[-1][1]}")
    while low > 0 and high - low > precision * low:
        middle = (low + high) / 2
        low, high = (middle, high) if is_good(middle) else (low, middle)
    found.rate = low
    return found
