"""A paper's claims, how they are measured here, and the results. Data and pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from string import Formatter

from research.papers.verdict import Verdict

Numbers = Mapping[str, float]


def short_of(reason: str) -> dict[Verdict, str]:
    """Returns the same reason for a partial gain and for none."""
    return {Verdict.PARTLY: reason, Verdict.REFUTED: reason}


@dataclass(frozen=True)
class Claim:
    # One or more words with hyphens, unique within its paper.
    name: str
    # The paper's claim in our words, and its setup: model, GPU, data.
    text: str
    setup: str
    # The paper's figure as shown in the table.
    figure: str
    # How our figure was obtained, and where the method differs from the paper's.
    how: str
    # The text of our figure, with the names of numbers in braces.
    ours: str
    judge: Callable[[Numbers], Verdict]
    # Reasons for a verdict, as far as they were investigated, with the names of numbers in braces.
    because: Mapping[Verdict, str] = field(default_factory=dict)
    # Computes more numbers from the measured ones, for the texts and the judgement.
    derive: Callable[[Numbers], Numbers] = lambda numbers: {}

    def complete(self, numbers: Numbers) -> Numbers:
        return {**numbers, **self.derive(numbers)}


@dataclass(frozen=True)
class Finding:
    paper: str
    claim: str
    text: str
    setup: str
    figure: str
    ours: str
    how: str
    verdict: Verdict
    reason: str
    # Maps each number to its value for every seed.
    numbers: Mapping[str, Sequence[float]]
    # Whether it was measured with --quick.
    is_quick: bool = False
    # When and at which commit.
    measured: str = ""


@dataclass(frozen=True)
class Size:
    """How much to measure."""

    is_quick: bool = False
    # A trace in Azure's format with lengths that replace the generated ones.
    azure_trace: Path | None = None
    # Questions with answers (JSON lines) to predict lengths on, instead of the demo model's tasks.
    answers: Path | None = None
    # The number of seeds; None: two, or one with --quick.
    seeds: int | None = None

    @property
    def num_seeds(self) -> int:
        return self.seeds or (1 if self.is_quick else 2)

    def scaled(self, number: int) -> int:
        """Scales a number of requests or seconds."""
        return max(number // 3, 1) if self.is_quick else number


# Returns the numbers of each claim, by the claim's name, for one seed.
Measure = Callable[[Size, int], Mapping[str, Numbers]]


@dataclass(frozen=True)
class Experiment:
    """One set of runs that serves one or more claims."""

    claims: Sequence[Claim]
    measure: Measure
    # Whether it measures elapsed time. Then nothing else in the benchmark runs beside it, and it needs no other seeds.
    is_timed: bool = False


@dataclass(frozen=True)
class Paper:
    name: str
    title: str
    experiments: Sequence[Experiment]


def names_of(claim: Claim) -> set[str]:
    """Returns the numbers that its texts mention."""
    texts = (claim.ours, *claim.because.values())
    return {name for text in texts for _, name, _, _ in Formatter().parse(text) if name}


def tells(claim: Claim, numbers: Numbers) -> bool:
    """Returns whether these are the numbers of this version of the claim."""
    try:
        return names_of(claim) <= claim.complete(numbers).keys()
    except KeyError:
        return False


def finding(
    paper: str, claim: Claim, by_seed: Sequence[Numbers], is_quick: bool = False, measured: str = ""
) -> Finding:
    """The verdict is that for the medians over seeds."""
    numbers = {name: [each[name] for each in by_seed] for name in by_seed[0]}
    middle = claim.complete({name: median(values) for name, values in numbers.items()})
    verdict = claim.judge(middle)
    reason = claim.because.get(verdict, "")
    return Finding(
        paper,
        claim.name,
        claim.text,
        claim.setup,
        claim.figure,
        claim.ours.format(**middle),
        claim.how,
        verdict,
        reason.format(**middle),
        numbers,
        is_quick,
        measured,
    )
