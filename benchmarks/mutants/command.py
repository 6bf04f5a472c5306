"""Tries random mutants of the deciding code against the tests and `alignedserve dev vopr`.

    python -m benchmarks.mutants --random N --seed S [--named] [--only TEXT ...] [--jobs J] [--out DIR] [--of TREE]
                                 [--tests PATH ...] [--cpu-s S] [--vopr-cpu-s S] [--continue] [--live]

The seed draws the same number of mutants from each area (areas.py, changes.py); `--named` adds those in mutants.toml.
The same seed draws the same mutants in another commit, except for functions that differ. `--of` names the checkout
whose code and tests are tried. To compare the tests of two commits, run this in each.

A mutant is caught if a test fails or hangs. First, once per state of the tree, every test is run with probes, which
record the statements of the deciding code it executes, and its cost (reach.json in DIR). Then a mutant is tried against
the tests that execute its statement, nearest and cheapest first, until one fails or they have taken `--cpu-s` seconds
of CPU time. A long test, or one that CI runs a second time, has to fail twice. Mutants not caught by then are tried
with vopr for `--vopr-cpu-s`. Each failing test or seed is run once more without the mutant and has to pass. Property
tests draw the same examples as in CI, where `CI` makes them the same each time. A copy has no commit, so its share of
large matrices is that of `--draw 0`; CI uses other shares.

A value that a test module computes when it is imported (an argument of `parametrize`) is computed without the mutant.
Probes don't see what runs in processes that a test starts. The tests of whole systems are therefore left out:
`cluster`, `launch`, `clients`, `deploy`, `benchmarks`. So are tests of models and kernels, which decide nothing.
`--live` tries all survivors together against the tests in `cluster` and `launch` (live.py), which takes hours.
`--continue` continues where DIR's results stopped if the tree is the same.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.mutants.areas import AREAS, files_of
from benchmarks.mutants.catch import Bounds, Verdict, attempt, attempt_imported
from benchmarks.mutants.copies import CollectedTests, copy_tree
from benchmarks.mutants.draw import draw
from benchmarks.mutants.edit import Edit
from benchmarks.mutants.live import caught_live, files_in, run_in
from benchmarks.mutants.mutant import ROOT
from benchmarks.mutants.named import named_edits
from benchmarks.mutants.reach import VOPR, digest_of, load, measure
from benchmarks.mutants.table import save, saved

_T = TypeVar("_T")
# CPU seconds that every mutant is tried for first.
_SHORT_S = 20.0
# Folders with code that decides, or runs such code, come first.
FOLDERS = (
    "router",
    "scheduling",
    "kvpool",
    "prefill_worker",
    "decode_worker",
    "instance",
    "protocol",
    "store",
    "batch",
    "gateway",
    "process",
    "transport",
    "timing",
    "lengths",
    "sim",
    "vopr",
    "offline",
    "cli",
)


class Trials:
    """Test servers, each in its own copy, that work through the mutants."""

    def __init__(self, root: Path, digest: str, tests: list[str], num_jobs: int, out: Path) -> None:
        self._root, self._paths, self._num_jobs, self._out = root, tests, num_jobs, out
        self._lock = threading.Lock()
        self.edited = sorted(
            {file for area in AREAS for file in files_of(area, root)}
            | {each.file for each in named_edits(root)}
        )
        self.reach = load(out / "reach.json", digest)

    def measure(self, servers: list[CollectedTests]) -> None:
        names = [name for name in [*servers[0].runs_twice, VOPR] if name not in self.reach.tests]
        left = list(dict.fromkeys(name.split("::")[0] for name in names))

        def one(server: CollectedTests, file: str) -> None:
            answers: list[dict[str, Any]] = []
            measure(server, file, self.edited, answers.append)
            with self._lock:
                for answer in answers:
                    self.reach.add(answer)
                self.reach.save(self._out / "reach.json")
            cpu_s = sum(each["cpu_s"] for answer in answers for each in answer["ended"])
            failed = [e for answer in answers for e in answer["ended"] if e["outcome"] == "failed"]
            print(
                f"{cpu_s:6.1f} s  {file}",
                *(f"\n  left out: {e['ends']}: {e['why']}" for e in failed),
                flush=True,
            )

        self._share(servers, left, one)

    def attempt(
        self,
        servers: list[CollectedTests],
        edits: list[Edit],
        bounds: Bounds,
        before: dict[str, Verdict],
        add: Callable[[Verdict], None],
    ) -> None:
        def one(server: CollectedTests, edit: Edit) -> None:
            verdict = before.get(edit.key)
            if not (verdict and verdict.is_imported):
                verdict = attempt(edit, server, self.reach, bounds, verdict)
            if verdict.is_outside or verdict.is_imported:
                start = partial(self._collected, server.copy)
                known = verdict if verdict.is_imported else None
                verdict = attempt_imported(edit, server, start, self.reach, bounds, known)
            with self._lock:
                add(verdict)

        self._share(servers, edits, one)

    def _collected(self, copy: Path) -> CollectedTests:
        return CollectedTests(copy, self._paths, self.edited, self._out / "tests.log")

    def servers(self, folder: Path) -> list[CollectedTests]:
        started: list[CollectedTests] = []

        def start(at: int) -> None:
            started.append(self._collected(copy_tree(self._root, folder / f"copy-{at}")))

        _together([partial(start, at) for at in range(self._num_jobs)])
        return started

    def _share(
        self, servers: list[CollectedTests], todo: list[_T], do: Callable[[CollectedTests, _T], None]
    ) -> None:
        left = deque(todo)

        def work(server: CollectedTests) -> None:
            while left:
                with self._lock:
                    if not left:
                        return
                    one = left.popleft()
                do(server, one)

        _together([partial(work, server) for server in servers])


def _together(calls: list[Callable[[], None]]) -> None:
    """Runs each call in a thread, and raises the first error that one of them raised."""
    errors: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def run(args: argparse.Namespace) -> None:
    """Takes the options of __main__.py."""
    root, out = (args.of or ROOT).resolve(), args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    edits = [
        *(draw(root, args.random, args.seed) if args.random else ()),
        *(named_edits(root) if args.named else ()),
    ]
    edits = [each for each in edits if any(text in each.name or text == each.key for text in args.only)]
    digest = digest_of(root)
    found = {each.key: each for each in saved(out, digest)} if args.goes_on else {}
    chosen = {"only": [each for each in args.only if each], "tests": args.tests or []}
    command = (
        f"python -m benchmarks.mutants --random {args.random} --seed {args.seed}{' --named' * args.named} "
        f"--cpu-s {args.cpu_s:g} --vopr-cpu-s {args.vopr_cpu_s:g}{' --live' * args.live}"
        + "".join(f" --{name} {shlex.join(given)}" for name, given in chosen.items() if given)
    )

    def add(verdict: Verdict) -> None:
        found[verdict.key] = verdict
        save([*found.values()], out, command, digest)
        print(
            f"{verdict.cpu_s:6.1f} s  {'caught' if verdict.is_caught else 'ALIVE ':6}  {verdict.key} {verdict.name}"
            f"  {verdict.by}",
            flush=True,
        )

    paths = args.tests or [f"tests/{folder}" for folder in FOLDERS if (root / "tests" / folder).exists()]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trials = Trials(root, digest, paths, args.jobs, out)
        servers = trials.servers(Path(folder))
        try:
            if servers[0].num_broken:
                sys.exit(f"{servers[0].num_broken} files of tests can't be imported: see {out}/tests.log")
            trials.measure(servers)
            if trials.reach.tests[VOPR].outcome != "passed":
                sys.exit("vopr fails without any mutant: see `alignedserve dev vopr --first-seed 0`")
            todo = [each for each in edits if each.key not in found]
            trials.attempt(servers, todo, Bounds(min(_SHORT_S, args.cpu_s), 0.0), found, add)
            todo = [each for each in edits if not found[each.key].is_caught]
            trials.attempt(servers, todo, Bounds(args.cpu_s, args.vopr_cpu_s), dict(found), add)
        finally:
            for server in servers:
                server.end()
        if args.live:
            alive = [each for each in edits if not found[each.key].is_caught]

            def tell(edit: Edit, test: str) -> None:
                add(replace(found[edit.key], is_caught=True, by=test, why="in a live system"))

            copy = servers[0].copy
            caught_live(alive, files_in(copy), run_in(copy), tell)
    print(f"{sum(each.is_caught for each in found.values())} of {len(found)} caught")
