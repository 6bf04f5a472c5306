"""`best_of`: more choices are made than are asked for, and the likeliest are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from alignedserve.gateway.generation import Delta


def keep_best(deltas: Sequence[Delta], num_made: int, num_kept: int) -> list[Delta]:
    """Of each prompt's `num_made` choices those with the highest mean log-probability, the best first, numbered anew.
    Deltas have log-probabilities."""
    likelihood = _mean_logprobs(deltas)
    places: dict[int, int] = {}
    for first in range(0, max(likelihood) + 1, num_made):
        made = sorted(range(first, first + num_made), key=lambda index: -likelihood[index])
        new_first = first // num_made * num_kept
        places |= {index: new_first + rank for rank, index in enumerate(made[:num_kept])}
    return [replace(delta, index=places[delta.index]) for delta in deltas if delta.index in places]


def _mean_logprobs(deltas: Sequence[Delta]) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for delta in deltas:
        found.setdefault(delta.index, []).extend(logprob for logprob, _, _ in delta.logprobs)
    return {index: sum(logprobs) / max(1, len(logprobs)) for index, logprobs in found.items()}
