"""Tries a mutant against the tests that execute its statement, the nearest and cheapest first, and then against vopr.

This costs what tests cost until one fails. So that what is caught early is known early, all are tried for a short time
first, and then those that live go on where they stopped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.mutants.areas import area_of
from benchmarks.mutants.copies import CollectedTests, mutated
from benchmarks.mutants.edit import Edit
from benchmarks.mutants.mutant import with_text
from benchmarks.mutants.reach import VOPR, Reach


@dataclass(frozen=True)
class Bounds:
    """What a mutant that nothing catches may cost, in seconds of a processor's time."""

    tests_cpu_s: float = 120.0
    vopr_cpu_s: float = 60.0
    # The first seed of vopr, all mutants the same.
    first_seed: int = 1


@dataclass(frozen=True)
class Verdict:
    key: str
    name: str
    # None: its file is in no area.
    area: str | None
    file: str
    line: int
    function: str
    old: str
    new: str
    is_caught: bool
    # The test that failed, or the seed of vopr, and how.
    by: str
    why: str
    # The number of tests that execute the statement, and of those that were run.
    num_reaching: int
    num_run: int
    # Whether vopr executes its file.
    is_in_vopr: bool
    # Seconds of a processor's time that tests took.
    cpu_s: float
    # The tests took as long as a mutant may: some that execute the statement were not run.
    is_cut: bool
    # CollectedTests can't see it in a fork: what it changes stands outside functions.
    is_outside: bool = False
    # Seconds of a processor's time for which vopr has looked for it.
    vopr_cpu_s: float = 0.0


def attempt(
    edit: Edit, tests: CollectedTests, reach: Reach, bounds: Bounds, before: Verdict | None = None
) -> Verdict:
    """`before`: how it went for a shorter time."""
    original = (tests.copy / edit.file).read_text()
    with mutated(tests.copy, edit) as text:
        reaching = reach.of(edit.file, edit.statement_line)
        trial = _Trial({"file": edit.file, "text": text}, tests, reach, before, original)
        return _attempt(edit, trial, reaching, bounds)


def attempt_imported(edit: Edit, tests: CollectedTests, reach: Reach, bounds: Bounds) -> Verdict:
    """As `attempt`, of tests that have imported the mutant already: all those that execute anything in its file."""
    lines = {line for file, line in reach.places if file == edit.file}
    reaching = list(dict.fromkeys(name for line in sorted(lines) for name in reach.of(edit.file, line)))
    trial = _Trial({}, tests, reach)
    if tests.num_broken:
        trial.by, trial.why = "import", f"{tests.num_broken} files of tests can't be imported"
    return _attempt(edit, trial, reaching, bounds)


def _attempt(edit: Edit, trial: _Trial, reaching: list[str], bounds: Bounds) -> Verdict:
    names = [name for name in reaching if name != VOPR]
    # Where no test executes it, those of its folder may still start processes that do.
    tried = names or [name for name in trial.reach.passing() if name.startswith(_folder(edit.file))]
    if not trial.by:
        trial.run(ordered(edit.file, tried, trial.reach)[trial.num_run :], bounds.tests_cpu_s)
    # Its seeds of today may execute what those that were measured did not.
    is_in_vopr = trial.reach.is_executed(edit.file, by=VOPR)
    if is_in_vopr and not trial.by and not trial.is_outside and trial.vopr_cpu_s < bounds.vopr_cpu_s:
        trial.run_seeds(bounds.first_seed, edit.systems, bounds.vopr_cpu_s)
    return Verdict(
        edit.key,
        edit.name,
        area_of(edit.file),
        edit.file,
        edit.line,
        edit.function,
        edit.old,
        edit.new,
        bool(trial.by),
        trial.by,
        trial.why,
        len(names),
        trial.num_run,
        is_in_vopr,
        round(trial.cpu_s, 2),
        trial.is_cut,
        trial.is_outside,
        trial.vopr_cpu_s,
    )


def ordered(file: str, names: list[str], reach: Reach) -> list[str]:
    """Those of the folder that mirrors the file's before others, cheap ones before dear ones; tests of one file stay
    together, since they share what the file sets up."""
    folder = _folder(file)
    cost_of: dict[tuple[int, str], float] = defaultdict(float)
    tiers = {}
    for name in names:
        cpu_s, is_near = reach.tests[name].cpu_s, name.startswith(folder)
        tiers[name] = next(
            at for at, (most_s, is_for_all) in enumerate(_TIERS) if cpu_s < most_s and (is_near or is_for_all)
        )
        cost_of[tiers[name], _file(name)] += cpu_s
    return sorted(
        names,
        key=lambda name: (
            tiers[name],
            cost_of[tiers[name], _file(name)],
            _file(name),
            reach.tests[name].cpu_s,
        ),
    )


# Seconds from which on a test takes long.
_LONG_S = 2.0
# Seconds of a processor's time that a test of the tier takes at most, and whether all are in it, or only near ones.
_TIERS = ((0.5, False), (0.1, True), (5.0, False), (2.0, True), (float("inf"), True))


def _folder(file: str) -> str:
    """The folder of tests that mirrors the file's."""
    parts = file.split("/")
    return f"tests/{parts[1] if parts[0] == 'alignedserve' else parts[0]}/"


def _file(name: str) -> str:
    return name.split("::")[0]


class _Trial:
    def __init__(
        self,
        mutant: dict[str, Any],
        tests: CollectedTests,
        reach: Reach,
        before: Verdict | None = None,
        original: str | None = None,
    ) -> None:
        """`original`: the text of the mutant's file without it; None if it is imported for good."""
        self._mutant, self._tests, self.reach, self._original = mutant, tests, reach, original
        self.by = self.why = ""
        self.num_run, self.cpu_s = (before.num_run, before.cpu_s) if before else (0, 0.0)
        self.vopr_cpu_s = before.vopr_cpu_s if before else 0.0
        self.is_cut = self.is_outside = False

    def run(self, names: list[str], cpu_s: float) -> None:
        while names and not self.by and not self.is_cut and not self.is_outside:
            last = self._ask({"items": names, "cpu_s": max(0.0, cpu_s - self.cpu_s)})
            if last is None:
                return
            self.num_run += names.index(last["ends"]) + 1
            if last["outcome"] == "failed" and self._is_sure(last["ends"]):
                self.by, self.why = last["ends"], last["why"]
            names = names[names.index(last["ends"]) + 1 :]

    def _is_sure(self, name: str) -> bool:
        """Whether it is the mutant that a test has failed for. One that takes long, or that CI runs once more if it
        fails, depends on how busy the machine is: it has to fail once more, and then to pass without the mutant."""
        if not self._tests.runs_twice[name] and self.reach.tests[name].wall_s < _LONG_S:
            return True
        request = {"items": [name], "cpu_s": 1e9}
        again = self._ask(request)
        if again is None or again["outcome"] != "failed":
            return False
        if self._original is None:
            return True
        with with_text(self._tests.copy / self._mutant["file"], self._original):
            without = self._tests.ask(request | {"limits": self.reach.limits([name])})
        return bool(without["outcome"] == "passed")

    def run_seeds(self, first_seed: int, systems: Sequence[str], cpu_s: float) -> None:
        spent_s = self.cpu_s
        last = self._ask({"first_seed": first_seed, "systems": systems, "cpu_s": cpu_s})
        self.cpu_s, self.vopr_cpu_s = spent_s, cpu_s
        if last and last["outcome"] == "failed":
            self.by, self.why = last["ends"], last["why"]

    def _ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Returns what is known of the last test that was run."""
        limits = self.reach.limits(request.get("items", ()))
        answer = self._tests.ask(request | self._mutant | {"limits": limits})
        ended: list[dict[str, Any]] = answer["ended"]
        self.cpu_s += sum(each["cpu_s"] for each in ended)
        if "items" in request:
            self.is_cut = answer["outcome"] == "spent"
        self.is_outside = answer["outcome"] == "outside"
        if ended and not ended[-1]["ends"]:
            raise RuntimeError(f"no test could be run: {ended[-1]['why']}")
        return ended[-1] if ended else None
