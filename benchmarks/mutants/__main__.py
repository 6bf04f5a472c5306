"""Lets `alignedserve dev vopr` search for each mutant until it is found or the time is up.

    python -m benchmarks.mutants [--minutes 5] [--only TEXT ...] [--jobs 2] [--out DIR] [--continue]

`--minutes` assumes a machine that does nothing else and has one core per job. What is counted is CPU time, so the
machine may do other things as well. `--only` selects mutants with one of these texts in their name or file.
`--continue` skips mutants that DIR already has results for; all of them take hours. Writes mutants.md and mutants.json.
The exit status is 1 if any mutant was not found.

With `--random N` or `--named`, mutants are tried against the tests instead: see command.py.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import FOLDER, parser_of, table, write_page
from benchmarks.mutants import command
from benchmarks.mutants.catch import Bounds
from benchmarks.mutants.family import load_of
from benchmarks.mutants.mutant import Mutant, copy_packages, living, mutants

# The exit status of `alignedserve dev vopr` when a check failed.
FOUND = 1
# Its exit status after this program stopped it.
STOPPED = -signal.SIGKILL
# How long a search may take, as a multiple of its time on a machine that does nothing else.
_MOST_TIMES = 6
_LOOK_S = 1.0
# The beginning of vopr's last line, which tells how to replay a failure.
REPLAYS = "alignedserve dev vopr --seed"


@dataclass(frozen=True)
class Hunt:
    """How the search for one mutant went."""

    name: str
    file: str
    # The system it was searched for in; None: in all.
    system: str | None
    is_found: bool
    # CPU time.
    cpu_s: float
    # What failed, and the command that reproduces it.
    failure: str
    command: str


def hunt(mutant: Mutant, copy: Path, minutes: float, num_jobs: int, first_seed: int | None = None) -> Hunt:
    """Searches in random seeds, or in those from `first_seed` on.

    Raises RuntimeError if the search itself fails, or if the failure it found is not caused by the mutant."""
    most_cpu_s = 60 * minutes * num_jobs
    flags = ["--minutes", str(_MOST_TIMES * minutes), "--jobs", str(num_jobs), "--no-shrink"]
    flags += ["--out", str(copy / "out")]
    if first_seed is not None:
        flags += ["--first-seed", str(first_seed)]
    if mutant.system:
        flags += ["--system", mutant.system]
    with living(mutant, copy), _Search(copy, flags) as search:
        out, errors, cpu_s = search.until_it_ends(most_cpu_s)
    status, lines = search.status, out.strip().splitlines()
    # Python exits with the same status when vopr itself fails.
    is_found = status == FOUND and bool(lines) and lines[-1].startswith(REPLAYS)
    if is_found:
        if fails(copy, lines[-1]):
            raise RuntimeError(f"{lines[-1]}: fails without a mutant as well")
        return Hunt(mutant.name, mutant.file, mutant.system, cpu_s <= most_cpu_s, cpu_s, lines[-2], lines[-1])
    if status != STOPPED:
        took = f"after {cpu_s:.0f} of {most_cpu_s:.0f} CPU seconds"
        raise RuntimeError(f"{mutant.name}: vopr ended with status {status} {took}: {errors[-2000:]}")
    return Hunt(mutant.name, mutant.file, mutant.system, False, cpu_s, "", "")


def fails(copy: Path, command: str) -> bool:
    """Returns whether a simulation fails in these packages as they are."""
    words = [sys.executable, "-m", *shlex.split(command), "--no-shrink", "--out", str(copy / "out")]
    ran = subprocess.run(words, cwd=copy, env=_environment(copy), capture_output=True, text=True)
    if ran.returncode not in (0, FOUND):
        raise RuntimeError(f"{command}: ended with status {ran.returncode}: {ran.stderr[-2000:]}")
    return ran.returncode == FOUND


def _environment(copy: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}


class _Search:
    """Runs `alignedserve dev vopr` with its processes. All of them have ended when the block is left."""

    def __init__(self, copy: Path, flags: Sequence[str]) -> None:
        self._vopr = subprocess.Popen(
            [sys.executable, "-m", "alignedserve", "dev", "vopr", *flags],
            cwd=copy,
            env=_environment(copy),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def __enter__(self) -> _Search:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._vopr.pid, signal.SIGKILL)
        self._vopr.communicate()

    @property
    def status(self) -> int | None:
        return self._vopr.returncode

    def until_it_ends(self, most_cpu_s: float) -> tuple[str, str, float]:
        """Returns its output, its errors and the CPU time it took. It is killed once it has taken `most_cpu_s`."""
        before_s, seen_s = _children_cpu_s(), 0.0
        while True:
            try:
                out, errors = self._vopr.communicate(timeout=_LOOK_S)
            except subprocess.TimeoutExpired:
                seen_s = load_of(self._vopr.pid).cpu_s
                if seen_s > most_cpu_s:
                    os.killpg(self._vopr.pid, signal.SIGKILL)
            else:
                # Children killed together with it were not waited for, so their time is missing from its children's CPU
                # time.
                return out, errors, max(seen_s, _children_cpu_s() - before_s)


def _children_cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def page(hunts: Sequence[Hunt], minutes: float, num_jobs: int) -> str:
    num_found, survives = (
        sum(each.is_found for each in hunts),
        {each.name: each.survives for each in mutants()},
    )
    head = (
        f"# Mutants\n\n`alignedserve dev vopr` finds {num_found} of {len(hunts)} one-line mutants of the deciding code "
        f"within {minutes:g} minutes on {num_jobs} cores, {60 * minutes * num_jobs:g} s of processor time. `python "
        "-m benchmarks.mutants` repeats this.\n\n"
        "Mutants of gateways and batch jobs run only in whole systems, and are searched for there (`--system whole`). "
        "The others are searched for in all kinds of systems.\n\n"
    )
    names = ("mutant", "file", "systems", "CPU seconds", "what did not hold, or what else holds")
    rows = [
        (
            *(each.name, f"`{each.file}`", each.system or "all"),
            f"{each.cpu_s:.0f}" if each.is_found else "not found",
            each.failure.replace("|", "/")[:160] or survives.get(each.name, ""),
        )
        for each in hunts
    ]
    return f"{head}{table(names, rows)}\n"


def save(hunts: Sequence[Hunt], to: Path, minutes: float, num_jobs: int) -> None:
    write_page(to / "mutants", page(hunts, minutes, num_jobs), hunts)


def hunted_before(directory: Path) -> dict[str, Hunt]:
    path = directory / "mutants.json"
    hunts = [Hunt(**each) for each in json.loads(path.read_text())] if path.exists() else []
    return {each.name: each for each in hunts}


def main() -> None:
    parser = parser_of(__doc__, out=FOLDER | {"default": Path()})
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--continue", action="store_true", dest="goes_on")
    # Options for mutants that are tried against the tests.
    parser.add_argument("--random", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--named", action="store_true")
    parser.add_argument("--of", type=Path)
    parser.add_argument("--tests", nargs="+")
    parser.add_argument("--cpu-s", type=float, default=Bounds.tests_cpu_s)
    parser.add_argument("--vopr-cpu-s", type=float, default=Bounds.vopr_cpu_s)
    parser.add_argument("--live", action="store_true")
    args = parser.parse_args()
    if args.random or args.named:
        command.run(args)
        return
    before = hunted_before(args.out) if args.goes_on else {}
    chosen = [each for each in mutants() if any(text in each.name or text in each.file for text in args.only)]
    hunts: list[Hunt] = []
    with tempfile.TemporaryDirectory() as directory:
        copy_packages(Path(directory))
        for mutant in chosen:
            found = before.get(mutant.name) or hunt(mutant, Path(directory), args.minutes, args.jobs)
            hunts.append(found)
            verdict = "found" if found.is_found else "NOT FOUND"
            print(f"{found.cpu_s:6.0f} s  {verdict:9}  {mutant.name}: {found.failure}", flush=True)
            save(hunts, args.out, args.minutes, args.jobs)
    print(f"{sum(each.is_found for each in hunts)} of {len(hunts)} found")
    sys.exit(0 if all(each.is_found for each in hunts) else 1)


if __name__ == "__main__":
    main()
