"""Lets `alignedserve vopr` look for each mutant until it is found or the time is up.

    python -m benchmarks.mutants [--minutes 10] [--only TEXT ...] [--jobs N] [--out DIR] [--continue]

`--only`: those with one of the texts in their name or file. `--continue`: not those that were found before, as DIR
says; all of them take hours. Writes mutants.md and mutants.json. Exit status 1: not all were found.

With `--random N` or `--named` mutants are tried against the tests instead: see command.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.mutants import command
from benchmarks.mutants.catch import Bounds
from benchmarks.mutants.mutant import Mutant, copy_packages, living, mutants

# `alignedserve vopr` ends with this status when something did not hold.
FOUND = 1
# And its last line says how to see that again.
REPLAYS = "alignedserve vopr --seed"


@dataclass(frozen=True)
class Hunt:
    """How the search for one mutant went."""

    name: str
    file: str
    # The systems in which it was looked for; None: in all.
    system: str | None
    is_found: bool
    seconds: float
    # What did not hold, and the command that shows it.
    failure: str
    command: str


def hunt(mutant: Mutant, copy: Path, minutes: float, num_jobs: int) -> Hunt:
    """Raises RuntimeError if the search itself fails."""
    flags = ["--minutes", str(minutes), "--jobs", str(num_jobs), "--no-shrink", "--out", str(copy / "out")]
    if mutant.system:
        flags += ["--system", mutant.system]
    begun_s = time.monotonic()
    with living(mutant, copy):
        ran = subprocess.run(
            [sys.executable, "-m", "alignedserve", "vopr", *flags],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
    seconds, lines = time.monotonic() - begun_s, ran.stdout.strip().splitlines()
    # Python ends with the same status when vopr itself fails.
    is_found = ran.returncode == FOUND and lines[-1:] and lines[-1].startswith(REPLAYS)
    if not is_found and (ran.returncode or not lines):
        raise RuntimeError(f"{mutant.name}: vopr ended with status {ran.returncode}: {ran.stderr[-2000:]}")
    if not is_found:
        return Hunt(mutant.name, mutant.file, mutant.system, False, seconds, "", "")
    return Hunt(mutant.name, mutant.file, mutant.system, True, seconds, lines[-2], lines[-1])


def page(hunts: Sequence[Hunt], minutes: float, num_jobs: int) -> str:
    num_found, survives = (
        sum(each.is_found for each in hunts),
        {each.name: each.survives for each in mutants()},
    )
    head = (
        f"# Mutants\n\n{num_found} of {len(hunts)} one-line mutants of the deciding code are found by `alignedserve "
        f"vopr` within {minutes:g} minutes on {num_jobs} cores (`python -m benchmarks.mutants`).\n\n"
        "Those of gateways and batch jobs, whose lines run in no others, are looked for in whole systems alone "
        "(`--system whole`), the others in all.\n\n"
        "| mutant | file | systems | seconds | what did not hold, or what else holds |\n"
        "| --- | --- | --- | --- | --- |\n"
    )
    return head + "".join(
        f"| {each.name} | `{each.file}` | {each.system or 'all'} "
        f"| {f'{each.seconds:.0f}' if each.is_found else 'not found'} "
        f"| {each.failure.replace('|', '/')[:160] or survives.get(each.name, '')} |\n"
        for each in hunts
    )


def save(hunts: Sequence[Hunt], to: Path, minutes: float, num_jobs: int) -> None:
    to.mkdir(parents=True, exist_ok=True)
    (to / "mutants.md").write_text(page(hunts, minutes, num_jobs))
    (to / "mutants.json").write_text(json.dumps([asdict(each) for each in hunts], indent=1) + "\n")


def found_before(directory: Path) -> dict[str, Hunt]:
    path = directory / "mutants.json"
    hunts = [Hunt(**each) for each in json.loads(path.read_text())] if path.exists() else []
    return {each.name: each for each in hunts if each.is_found}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--continue", action="store_true", dest="goes_on")
    # options of mutants that are tried against the tests
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
    before = found_before(args.out) if args.goes_on else {}
    chosen = [each for each in mutants() if any(text in each.name or text in each.file for text in args.only)]
    hunts: list[Hunt] = []
    with tempfile.TemporaryDirectory() as directory:
        copy_packages(Path(directory))
        for mutant in chosen:
            found = before.get(mutant.name) or hunt(mutant, Path(directory), args.minutes, args.jobs)
            hunts.append(found)
            verdict = "found" if found.is_found else "NOT FOUND"
            print(f"{found.seconds:6.0f} s  {verdict:9}  {mutant.name}: {found.failure}", flush=True)
            save(hunts, args.out, args.minutes, args.jobs)
    print(f"{sum(each.is_found for each in hunts)} of {len(hunts)} found")
    sys.exit(0 if all(each.is_found for each in hunts) else 1)


if __name__ == "__main__":
    main()
