"""The measurements in one JSON file, rewritten after every experiment.

It doesn't contain verdicts and reasons, because they follow from the numbers by the claims in the code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from research.papers.catalogue import PAPERS
from research.papers.claim import Claim, Finding, Numbers, finding, tells
from research.papers.run import Task
from research.papers.verdict import Verdict


def _said(run: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Says which run it was, and which numbers are from another one. Nothing if it has no date."""
    said = f"{run['date'][:10]} at {str(run['commit'])[:12]}" if "date" in run else ""
    return f"{said}; {found['also']}" if "also" in found else said


@dataclass
class Record:
    path: Path
    # The command, date, commit and machine of each run.
    runs: list[dict[str, Any]] = field(default_factory=list)
    # Maps a paper to its claims' names, and these to the run that measured them and each seed's numbers. `also` says
    # which of the numbers are from another run.
    measured: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    # The texts of findings that were measured with other workloads or baselines than the present ones, until they are
    # measured again.
    older: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)

    @staticmethod
    def at(path: Path) -> Record:
        """Reads what the file already has."""
        if not path.exists():
            return Record(path)
        read = json.loads(path.read_text())
        return Record(path, read["runs"], read["measured"], read.get("older", {}))

    def begin(self, run: dict[str, Any]) -> None:
        self.runs.append(run)

    def add(self, paper: str, claim: str, by_seed: list[Numbers]) -> None:
        """Replaces the results of earlier runs."""
        seeds = [dict(each) for each in by_seed]
        self.measured.setdefault(paper, {})[claim] = {"run": len(self.runs) - 1, "seeds": seeds}
        self.older.get(paper, {}).pop(claim, None)
        self._drop_runs()

    def write(self) -> None:
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps(self._content(), indent=1) + "\n")
        os.replace(unfinished, self.path)

    def has(self, task: Task) -> bool:
        """Returns whether all claims of the experiment were measured, with any seeds, and in full if that is
        required."""
        found = {(each.paper, each.claim) for each in self.findings() if each.numbers}
        names = [claim.name for claim in task.experiment.claims]
        return all((task.paper, name) in found and self._is_enough(task, name) for name in names)

    def _is_enough(self, task: Task, claim: str) -> bool:
        run = self.runs[self.measured[task.paper][claim]["run"]]
        return task.size.is_quick or "--quick" not in run["command"]

    def findings(self) -> list[Finding]:
        """Returns the findings for all current claims. Leaves out a claim if an older version of it was measured,
        because then the numbers are not those in its text."""
        return [
            found
            for paper in PAPERS.values()
            for experiment in paper.experiments
            for claim in experiment.claims
            if (found := self._finding(paper.name, claim))
        ]

    def _finding(self, paper: str, claim: Claim) -> Finding | None:
        found = self.measured.get(paper, {}).get(claim.name)
        if found and tells(claim, found["seeds"][0]):
            run = self.runs[found["run"]]
            return finding(paper, claim, found["seeds"], "--quick" in run["command"], _said(run, found))
        older: dict[str, Any] = self.older.get(paper, {}).get(claim.name, {})
        if not older:
            return None
        texts = older | {"verdict": Verdict(older["verdict"])}
        return Finding(paper, claim.name, numbers={}, **texts)

    def _content(self) -> dict[str, Any]:
        older = {"older": self.older} if any(self.older.values()) else {}
        return {"runs": self.runs, "measured": self.measured} | older

    def _drop_runs(self) -> None:
        """Drops runs with no remaining results, except the current one."""
        claims = [claim for of_paper in self.measured.values() for claim in of_paper.values()]
        used = sorted({claim["run"] for claim in claims} | {len(self.runs) - 1})
        places = {run: place for place, run in enumerate(used)}
        self.runs[:] = [self.runs[run] for run in used]
        for claim in claims:
            claim["run"] = places[claim["run"]]
