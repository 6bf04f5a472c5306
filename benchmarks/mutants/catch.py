"""Tries a mutant against the tests that execute its statement, nearest and cheapest first, and then against vopr.

A mutant costs CPU time until a test fails. To learn early what is caught early, all mutants are first tried for a short
time. Those that survive are then continued where they stopped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.mutants.areas import area_of
from benchmarks.mutants.copies import CollectedTests, mutated
from benchmarks.mutants.edit import Edit
from benchmarks.mutants.mutant import with_text
from benchmarks.mutants.reach import VOPR, Reach

# Sends a request to a test server: see server.py.
Ask = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Bounds:
    """The most CPU time in seconds that a mutant may take if nothing catches it."""

    tests_cpu_s: float = 120.0
    vopr_cpu_s: float = 60.0
    # The first seed for vopr, the same for all mutants.
    first_seed: int = 1


@dataclass(frozen=True)
class Verdict:
    key: str
    name: str
    # None if its file is in no area.
    area: str | None
    file: str
    line: int
    function: str
    old: str
    new: str
    is_caught: bool
    # The failed test or vopr seed, and how it failed.
    by: str
    why: str
    # The number of tests that execute the statement, and how many of them were run.
    num_reaching: int
    num_run: int
    # Whether vopr executes its file.
    is_in_vopr: bool
    # CPU seconds that the tests took.
    cpu_s: float
    # Whether the tests took the most time allowed, so some that execute the statement were not run.
    is_cut: bool
    # Whether CollectedTests can't apply it in a fork because it changes code outside functions.
    is_outside: bool = False
    # CPU seconds that vopr has searched for it.
    vopr_cpu_s: float = 0.0
    # Whether its tests were collected again with the mutant in its file: see `attempt_imported`.
    is_imported: bool = False


def attempt(
    edit: Edit, tests: CollectedTests, reach: Reach, bounds: Bounds, before: Verdict | None = None
) -> Verdict:
    """`before`: the result of a shorter trial."""
    original = (tests.copy / edit.file).read_text()
    with mutated(tests.copy, edit) as text:
        reaching = reach.of(edit.file, edit.statement_line)
        mutant = {"file": edit.file, "text": text}
        trial = _Trial(mutant, tests, reach, _asking_without(edit, original, tests), before)
        return _attempt(edit, trial, reaching, bounds)


def attempt_imported(
    edit: Edit,
    without: CollectedTests,
    start: Callable[[], CollectedTests],
    reach: Reach,
    bounds: Bounds,
    before: Verdict | None = None,
) -> Verdict:
    """Does the same as `attempt` for a mutant that is executed when its file is imported. `start` imports and collects
    everything again in the copy that `without` uses. All tests that execute anything in its file are tried. `before`:
    the result so far."""
    lines = {line for file, line in reach.places if file == edit.file}
    reaching = list(dict.fromkeys(name for line in sorted(lines) for name in reach.of(edit.file, line)))
    original = (without.copy / edit.file).read_text()
    ask_without = _asking_without(edit, original, without)
    with mutated(without.copy, edit):
        try:
            tests = start()
        except RuntimeError as error:
            trial = _Trial({}, without, reach, ask_without)
            trial.by, trial.why = "import", str(error)
            return _attempt(edit, trial, reaching, bounds)
        try:
            trial = _Trial({}, tests, reach, ask_without, before)
            trial.is_imported = True
            if tests.num_broken:
                trial.by, trial.why = "import", f"{tests.num_broken} files of tests can't be imported"
            return _attempt(edit, trial, reaching, bounds)
        finally:
            tests.end()


def _asking_without(edit: Edit, original: str, tests: CollectedTests) -> Ask:
    """`original`: the mutant's file without the mutant. Meanwhile processes that tests start also read this text."""

    def ask(request: dict[str, Any]) -> dict[str, Any]:
        with with_text(tests.copy / edit.file, original):
            return tests.ask(request)

    return ask


def _attempt(edit: Edit, trial: _Trial, reaching: list[str], bounds: Bounds) -> Verdict:
    # Some may not have been measured, and an imported mutant may change test ids.
    names = [name for name in reaching if name in trial.tests.runs_twice]
    # If no test executes it, tests in its folder may still start processes that do.
    near = (name for name in trial.reach.passing() if name.startswith(_folder(edit.file)))
    tried = names or [name for name in near if name in trial.tests.runs_twice]
    if not trial.by:
        trial.run(ordered(edit.file, tried, trial.reach)[trial.num_run :], bounds.tests_cpu_s)
    # vopr's current seeds may execute code that the measured seeds did not.
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
        trial.is_imported,
    )


def ordered(file: str, names: list[str], reach: Reach) -> list[str]:
    """Tests in the folder that mirrors the file's folder come before others, and cheap ones before expensive ones.
    Tests in one file stay together because they share its setup."""
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


# A test that takes at least this many seconds is considered long.
_LONG_S = 2.0
# Each tier's most CPU seconds per test, and whether it has all tests or only near ones.
_TIERS = ((0.5, False), (0.1, True), (5.0, False), (2.0, True), (float("inf"), True))


def _folder(file: str) -> str:
    """Returns the folder of tests that mirrors the file's folder."""
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
        ask_without: Ask,
        before: Verdict | None = None,
    ) -> None:
        """`ask_without`: sends a request to the same tests without the mutant."""
        self._mutant, self.tests, self.reach, self._ask_without = mutant, tests, reach, ask_without
        self.by = self.why = ""
        self.num_run, self.cpu_s = (before.num_run, before.cpu_s) if before else (0, 0.0)
        self.vopr_cpu_s = before.vopr_cpu_s if before else 0.0
        self.is_cut = self.is_outside = self.is_imported = False

    def run(self, names: list[str], cpu_s: float) -> None:
        while names and not self.by and not self.is_cut and not self.is_outside:
            last = self._ask({"items": names, "cpu_s": max(0.0, cpu_s - self.cpu_s)})
            if last is None:
                return
            num_run = names.index(last["ends"]) + 1
            self.num_run += num_run
            if last["outcome"] == "failed" and self._is_sure(names[:num_run]):
                self.by, self.why = last["ends"], last["why"]
            names = names[num_run:]

    def _is_sure(self, names: list[str]) -> bool:
        """Returns whether the last of these tests failed because of the mutant. To confirm it, all of them have to pass
        without the mutant. A long test, or one that CI runs again when it fails, depends on how busy the machine is, so
        it has to fail a second time first."""
        request = {"items": names, "cpu_s": 1e9}
        if self.tests.runs_twice[names[-1]] or self.reach.tests[names[-1]].wall_s >= _LONG_S:
            again = self._ask(request)
            if again is None or again["outcome"] != "failed" or again["ends"] != names[-1]:
                return False
        without = self._ask_without(request | {"limits": self.reach.limits(names)})
        return bool(without["outcome"] == "passed")

    def run_seeds(self, first_seed: int, systems: Sequence[str], cpu_s: float) -> None:
        """Ignores a seed that also fails without the mutant."""
        spent_s, seed = self.cpu_s, first_seed
        while self.cpu_s - spent_s < cpu_s:
            request = {"first_seed": seed, "systems": systems, "cpu_s": cpu_s - (self.cpu_s - spent_s)}
            last = self._ask(request)
            if last is None or last["outcome"] != "failed":
                break
            seed = int(last["ends"].split()[-1])
            if self._ask_without(request | {"first_seed": seed, "cpu_s": 0.0})["outcome"] == "passed":
                self.by, self.why = last["ends"], last["why"]
                break
            seed += 1
        self.cpu_s, self.vopr_cpu_s = spent_s, cpu_s

    def _ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the results of the last test that was run."""
        limits = self.reach.limits(request.get("items", ()))
        answer = self.tests.ask(request | self._mutant | {"limits": limits})
        ended: list[dict[str, Any]] = answer["ended"]
        self.cpu_s += sum(each["cpu_s"] for each in ended)
        if "items" in request:
            self.is_cut = answer["outcome"] == "spent"
        self.is_outside = answer["outcome"] == "outside"
        if ended and not ended[-1]["ends"]:
            raise RuntimeError(f"no test could be run: {ended[-1]['why']}")
        return ended[-1] if ended else None
