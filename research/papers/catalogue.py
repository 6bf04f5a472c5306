"""All papers, by their names for `--paper`."""

from __future__ import annotations

from research.papers import accelgen, aligned_serve, alise, apt_serve, bros
from research.papers.claim import Paper

PAPERS: dict[str, Paper] = {
    paper.name: paper
    for paper in (aligned_serve.PAPER, alise.PAPER, bros.PAPER, accelgen.PAPER, apt_serve.PAPER)
}
