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
    """What a score is of: one that was made of another configuration, or by other code, is that of another key."""

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
            # Lines without a score name an error. Earlier versions wrote no keys: nobody knows what these are of.
            if "score" in told and "key" in told:
                self._scores[Key(**told["key"])] = Score(**told["score"])

    def __contains__(self, key: Key) -> bool:
        return key in self._scores

    def forget(self, policies: Sequence[str]) -> None:
        """They are tried again. Later lines of the file count."""
        self._scores = {key: score for key, score in self._scores.items() if key.policy not in policies}

    def of(self, regime: Regime, policies: Sequence[str]) -> list[Score]:
        """The scores of those policies that have one."""
        keys = [key_of(regime, policy) for policy in policies]
        return [self._scores[key] for key in keys if key in self._scores]

    def add(self, key: Key, score: Score) -> None:
        self._scores[key] = score
        self._write({"key": asdict(key), "score": asdict(score)})

    def failed(self, key: Key, error: str) -> None:
        """It is tried again by the next run."""
        self._write({"key": asdict(key), "error": error})

    def _write(self, line: dict[str, object]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
