"""Scores by scenario and policy, in a file that grows as they become known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.arena.played import Score


class Record:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._scores: dict[tuple[int, str], Score] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            told = json.loads(line)
            number = told.pop("number")
            self._scores[number, told["policy"]] = Score(**told)

    def missing(self, number: int, policies: Sequence[str]) -> list[str]:
        return [policy for policy in policies if (number, policy) not in self._scores]

    def forget(self, policies: Sequence[str]) -> None:
        """They are tried again. Later lines of the file count."""
        self._scores = {place: score for place, score in self._scores.items() if place[1] not in policies}

    def of(self, number: int, policies: Sequence[str]) -> list[Score]:
        return [self._scores[number, policy] for policy in policies]

    def add(self, number: int, scores: Sequence[Score]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            for each in scores:
                self._scores[number, each.policy] = each
                file.write(json.dumps({"number": number} | asdict(each)) + "\n")
