"""A sorted set as in Redis: ids ordered by score, and those with equal scores by their bytes."""

from __future__ import annotations


class Ranked:
    def __init__(self) -> None:
        self._scores: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._scores)

    def __contains__(self, key: str) -> bool:
        return key in self._scores

    def put(self, key: str, score: float) -> None:
        self._scores[key] = score

    def put_new(self, key: str, score: float) -> None:
        """Does nothing for an id that is there."""
        self._scores.setdefault(key, score)

    def remove(self, key: str) -> None:
        """Safe to repeat."""
        self._scores.pop(key, None)

    def score(self, key: str) -> float:
        return self._scores[key]

    def ids(self) -> list[str]:
        return self.up_to(float("inf"))

    def up_to(self, score: float) -> list[str]:
        """Returns the ids with no greater score, the lowest first."""
        found = [(its, key.encode(), key) for key, its in self._scores.items() if its <= score]
        return [key for _, _, key in sorted(found)]
