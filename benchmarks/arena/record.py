"""Scores by scenario and policy, in a file that grows as they become known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.arena.digests import code_digest, scenario_digest
from benchmarks.arena.played import Score
from benchmarks.arena.regimes import Regime


@dataclass(frozen=True)
class Key:
    """Identifies a score. Another configuration or other code gives another key."""

    number: int
    policy: str
    # Digests of the scenario's configuration and of the policy's code.
    scenario: str
    code: str


def key_of(regime: Regime, policy: str) -> Key:
    return Key(regime.number, policy, scenario_digest(regime.config), code_digest(policy))


class Record:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._scores: dict[Key, Score] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            told = json.loads(line)
            # Lines without a score contain an error. Lines of earlier versions have no keys, and can't be assigned.
            if "score" in told and "key" in told:
                self._scores[Key(**told["key"])] = Score(**told["score"])

    def __contains__(self, key: Key) -> bool:
        return key in self._scores

    def forget(self, policies: Sequence[str]) -> None:
        """Forgets the policies' scores, so that they are played again. Later lines of the file take precedence."""
        self._scores = {key: score for key, score in self._scores.items() if key.policy not in policies}

    def of(self, regime: Regime, policies: Sequence[str]) -> list[Score]:
        """Returns the scores of those policies that have one."""
        keys = [key_of(regime, policy) for policy in policies]
        return [self._scores[key] for key in keys if key in self._scores]

    def add(self, key: Key, score: Score) -> None:
        self._scores[key] = score
        self._write({"key": asdict(key), "score": asdict(score)})

    def failed(self, key: Key, error: str) -> None:
        """Records an error. The next run tries again."""
        self._write({"key": asdict(key), "error": error})

    def _write(self, line: dict[str, object]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
