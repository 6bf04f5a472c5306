"""Claims that wait for a part which does not exist yet: an experiment in the paper's file takes each one's place."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.papers.claim import Claim, Numbers
from benchmarks.papers.verdict import Verdict


@dataclass(frozen=True)
class Unbuilt:
    paper: str
    claim: Claim
    # What the reason says is not built yet.
    mechanism: str


def _never(_: Numbers) -> Verdict:
    return Verdict.NOT_MEASURED


def _unbuilt(paper: str, name: str, text: str, setup: str, figure: str, mechanism: str) -> Unbuilt:
    return Unbuilt(paper, Claim(name, text, setup, figure, "", "", _never), mechanism)


UNBUILT = [
    _unbuilt(
        "apt-serve",
        "hybrid-cache",
        "attainment with KV alone, and with layers' inputs for some requests",
        "OPT-13B, A100 40 GB; table 4",
        "ShareGPT 6/s: 65.7 → 67.3 %, LongBench 3/s: 70.0 → 77.6 %",
        "the hidden-state cache",
    ),
]
