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
        "aligned-serve",
        "batch-switches",
        "the share of iterations that mix two batches",
        "OPT-6.7B, H100; 4.4",
        "at most 8.61 % on ShareGPT, 12.37 % on LongBench",
        "a count of iterations that mix batches",
    ),
    _unbuilt(
        "alise",
        "recompute",
        "normalized latency with KV swapped by estimated waiting time, over deleting and computing it again",
        "OPT, V100, Alpaca; figure 8",
        "up to 2.8x",
        "deleting the KV of a preempted request, and computing it again",
    ),
    _unbuilt(
        "alise",
        "int8",
        "KV in host memory as INT8, which the paper uses throughout and gives no figure for",
        "3.2",
        "none",
        "INT8 in the pool",
    ),
    _unbuilt(
        "bros",
        "blocks",
        "attainment of RT with blocks that RT and BE share from both ends, over computing again",
        "OPT-30B, 10 requests/s; figure 13",
        "TTFT 1.23x, TPOT 1.63x",
        "sharing blocks from both ends",
    ),
]
