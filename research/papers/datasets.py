"""Generated requests with the lengths of datasets that are not available, or that a licence restricts.

Lengths are log-normal with a published mean and standard deviation, unless a dataset is given as ranges. Values beyond
the longest are drawn again. `source` tells where the numbers come from, and which of them are assumed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.sim.trace import Arrival, Lengths, gamma_arrivals, scale_rate


@dataclass(frozen=True)
class Lognormal:
    mean: float
    deviation: float
    longest: int = 2048
    shortest: int = 4

    def draw(self, dice: random.Random) -> int:
        variance = math.log(1 + (self.deviation / self.mean) ** 2)
        mu = math.log(self.mean) - variance / 2
        while True:
            length = round(dice.lognormvariate(mu, math.sqrt(variance)))
            if length <= self.longest:
                return max(length, self.shortest)


@dataclass(frozen=True)
class Ranges:
    """Shares of requests by range of length. Within a range, each order of magnitude is equally likely."""

    shares: Sequence[tuple[float, int, int]]

    def draw(self, dice: random.Random) -> int:
        _, low, high = dice.choices(self.shares, [share for share, _, _ in self.shares])[0]
        return round(math.exp(dice.uniform(math.log(low), math.log(high))))


@dataclass(frozen=True)
class Uniform:
    low: int
    high: int

    def draw(self, dice: random.Random) -> int:
        return dice.randint(self.low, self.high)


@dataclass(frozen=True)
class Either:
    """The first distribution in a given share of requests, otherwise the other."""

    share: float
    first: Uniform
    other: Uniform

    def draw(self, dice: random.Random) -> int:
        return (self.first if dice.random() < self.share else self.other).draw(dice)


Spread = Lognormal | Ranges | Uniform | Either


@dataclass(frozen=True)
class Dataset:
    name: str
    prompt: Spread
    output: Spread
    source: str

    def lengths(self, number: int, seed: int) -> list[Lengths]:
        dice = random.Random(f"{self.name} {seed}")
        return [Lengths(self.prompt.draw(dice), self.output.draw(dice)) for _ in range(number)]

    def arrivals(self, number: int, rate: float, seed: int, cv: float = 1.0) -> list[Arrival]:
        """Returns the same requests in the same rhythm at any rate."""
        return at_rate(self.lengths(number, seed), rate, seed, cv)


def at_rate(lengths: Sequence[Lengths], rate: float, seed: int, cv: float = 1.0) -> list[Arrival]:
    return scale_rate(gamma_arrivals(lengths, 1.0, cv, seed), rate)


BROS = "means and deviations of BROS's table 2"
DISTSERVE = "means from figure 7 of DistServe's paper; deviations assumed"

SHAREGPT = Dataset(
    "ShareGPT",
    Lognormal(222.76, 256.36),
    Lognormal(234.51, 268.50),
    BROS,
)
LMSYS = Dataset(
    "LMSYS-Chat-1M",
    Lognormal(90.50, 148.52),
    Lognormal(237.04, 228.21),
    BROS,
)
BE_SYNTHETIC = Dataset(
    "BE-Synthetic", Uniform(512, 1024), Uniform(32, 128), "the ranges that BROS states, drawn evenly"
)
ALPACA = Dataset(
    "Alpaca",
    Lognormal(19.31, 19.31),
    Lognormal(58.45, 58.45),
    "means from figure 11 of vLLM's paper; deviations assumed, as large as the means",
)
HUMANEVAL = Dataset(
    "HumanEval",
    Lognormal(171.3, 85.0),
    Lognormal(98.2, 50.0),
    f"{DISTSERVE}, as half of the means",
)
LONGBENCH = Dataset(
    "LongBench",
    Lognormal(1738.3, 900.0, longest=8000),
    Lognormal(90.7, 90.7),
    DISTSERVE,
)
LONGBENCH_APT = Dataset(
    "LongBench, cut",
    Lognormal(1400.0, 700.0, longest=1800),
    Lognormal(200.0, 150.0, longest=248),
    "assumed: Apt-Serve has long prompts of high variance and answers about as long as ShareGPT's, all within 2048 "
    "tokens. With these, Sarathi-Serve has nearly all requests in time at 1.5/s, as there",
)
AZURE = Dataset(
    "Azure conversation",
    Lognormal(1154.7, 1108.8, longest=7437),
    Lognormal(211.1, 162.9, longest=1000),
    "means and deviations of the public trace, cut at the 7437 tokens that AlignedServe names",
)
# AccelGen gives three shares of prompts for four ranges that together make one. A third of the answers would be longer
# than the 2048 tokens that the same paper allows, so they are limited to that.
ACCELGEN_MIX = Dataset(
    "Alpaca, ShareGPT and BookCorpus",
    Ranges([(0.34, 10, 512), (0.52, 512, 4096), (0.14, 4096, 8192)]),
    Ranges([(0.51, 10, 512), (0.49, 512, 2048)]),
    "the shares of AccelGen's figure 8, as its text states them; prompts up to 8192 tokens, answers up to 2048",
)


SYNTHETIC = Dataset(
    "95 % short prompts",
    Either(0.95, Uniform(16, 999), Uniform(1000, 8000)),
    Uniform(50, 350),
    "AlignedServe's ranges of prompts, drawn evenly; it does not state those of answers, which are assumed",
)

ALL = (
    SYNTHETIC,
    SHAREGPT,
    LMSYS,
    BE_SYNTHETIC,
    ALPACA,
    HUMANEVAL,
    LONGBENCH,
    LONGBENCH_APT,
    AZURE,
    ACCELGEN_MIX,
)
