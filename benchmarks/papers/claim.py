"""What a paper claims, how it is measured here, and what was found. Data and pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from string import Formatter

from benchmarks.papers.verdict import Verdict

Numbers = Mapping[str, float]


def short_of(reason: str) -> dict[Verdict, str]:
    """The same reason, whether there is some of the gain or none."""
    return {Verdict.PARTLY: reason, Verdict.REFUTED: reason}


@dataclass(frozen=True)
class Claim:
    # One word or a few with hyphens; it is unique within its paper.
    name: str
    # What the paper says, in our words, and its setup: model, GPU, data.
    text: str
    setup: str
    # The paper's figure, as it is written in the table.
    figure: str
    # How ours was obtained, and where it differs from the paper's way.
    how: str
    # The text of our figure, with the names of numbers in braces.
    ours: str
    judge: Callable[[Numbers], Verdict]
    # Why the verdict is what it is, as far as that was looked into, with the names of numbers in braces.
    because: Mapping[Verdict, str] = field(default_factory=dict)


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


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    is_quick: bool = False
    # A trace of the Azure format whose lengths replace the made ones.
    azure_trace: Path | None = None
    # Questions with answers (JSON lines) on which lengths are predicted, instead of the demo model's tasks.
    answers: Path | None = None
    # How many; None: two, or one where it is to be quick.
    seeds: int | None = None

    @property
    def num_seeds(self) -> int:
        return self.seeds or (1 if self.is_quick else 2)

    def scaled(self, number: int) -> int:
        """Of requests or seconds."""
        return max(number // 3, 1) if self.is_quick else number


# Returns the numbers of each claim, by the claim's name, for one seed.
Measure = Callable[[Size, int], Mapping[str, Numbers]]


@dataclass(frozen=True)
class Experiment:
    """One set of runs, which serves one claim or several."""

    claims: Sequence[Claim]
    measure: Measure
    # It takes wall-clock time, so that nothing else of the benchmark runs beside it; and it needs no other seeds.
    is_timed: bool = False


@dataclass(frozen=True)
class Paper:
    name: str
    title: str
    experiments: Sequence[Experiment]


def names_of(claim: Claim) -> set[str]:
    """The numbers that its texts name."""
    texts = (claim.ours, *claim.because.values())
    return {name for text in texts for _, name, _, _ in Formatter().parse(text) if name}


def finding(paper: str, claim: Claim, by_seed: Sequence[Numbers]) -> Finding:
    """The verdict is that of the seeds' medians."""
    numbers = {name: [each[name] for each in by_seed] for name in by_seed[0]}
    middle = {name: median(values) for name, values in numbers.items()}
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
    )
