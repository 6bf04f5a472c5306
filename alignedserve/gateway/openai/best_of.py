"""`best_of`: more choices are made than are asked for, and the likeliest are kept."""

from __future__ import annotations

from collections.abc import Mapping


def best_places(likelihood: Mapping[int, float], num_made: int, num_kept: int) -> dict[int, int]:
    """Of each prompt's `num_made` choices those that are likeliest, the best first: their numbers, and their new
    ones."""
    places: dict[int, int] = {}
    for first in range(0, max(likelihood) + 1, num_made):
        made = sorted(range(first, first + num_made), key=lambda index: -likelihood[index])
        new_first = first // num_made * num_kept
        places |= {index: new_first + rank for rank, index in enumerate(made[:num_kept])}
    return places
