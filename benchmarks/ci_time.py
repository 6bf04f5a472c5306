"""Measures CI, `make test-all` and `make test` from a clean checkout of the commit.

    python -m benchmarks.ci_time [--runs 3] [--skip-ci] [--out FILE]

Each run clones the commit and runs `.ci/run` there, which runs `make test-all` and reports its duration. Then it runs
`make test`. The clients' environments are created again, from the caches of pip, uv and npm. The time of each folder of
tests is recorded as well, and that of the fixed work between tests, since tests/budget.toml has both. With `--skip-ci`
only `make test` is measured. Nothing else may run on the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.harness import ROOT, facts, parser_of, write_json

RESULTS = ROOT / "benchmarks/results/ci_time.json"
CI, TEST_ALL, TEST = ".ci/run", "make test-all", "make test"


def run(checkout: Path, command: str, **environment: str) -> float:
    """Returns the seconds that the command took. Raises CalledProcessError if it fails."""
    begun_s = time.monotonic()
    subprocess.run(command.split(), cwd=checkout, env=os.environ | environment, check=True, stdout=sys.stderr)
    return time.monotonic() - begun_s


@dataclass(frozen=True, kw_only=True)
class Round:
    """Seconds per command, and of `make test-all` those per folder of tests/ and of the fixed work between tests."""

    commands_s: dict[str, float]
    folders_s: dict[str, float]
    fixed_work_s: float


def measure(with_ci: bool) -> Round:
    with tempfile.TemporaryDirectory(prefix="ci-time-") as directory:
        checkout, record = Path(directory) / "checkout", Path(directory) / "record.json"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(checkout)], check=True)
        found, folders, fixed_work_s = {}, {}, 0.0
        if with_ci:
            clients = str(Path(directory) / "clients")
            found[CI] = run(checkout, "bash .ci/run", RECORD=str(record), ALIGNEDSERVE_CLIENTS_DIR=clients)
            recorded = json.loads(record.read_text())
            found[TEST_ALL], folders = float(recorded["whole_s"]), recorded["folders"]
            fixed_work_s = float(recorded["fixed_work_s"])
        else:
            run(checkout, "make .venv/installed")
        commands = found | {TEST: run(checkout, TEST)}
        return Round(commands_s=commands, folders_s=folders, fixed_work_s=fixed_work_s)


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(median(each[name] for each in rounds), 2) for name in rounds[0]}


def main() -> None:
    parser = parser_of(__doc__, out={"default": RESULTS})
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--skip-ci", action="store_true")
    args = parser.parse_args()
    rounds: list[Round] = []
    for number in range(args.runs):
        rounds.append(measure(not args.skip_ci))
        said = ", ".join(f"{name} {each:.0f} s" for name, each in rounds[-1].commands_s.items())
        print(f"run {number + 1}: {said}", flush=True)
        found = {
            "runs_s": [each.commands_s for each in rounds],
            "median_s": medians([each.commands_s for each in rounds]),
            "folders_s": medians([each.folders_s for each in rounds]),
            "fixed_work_s": round(median(each.fixed_work_s for each in rounds), 4),
        }
        write_json(args.out, facts() | found)


if __name__ == "__main__":
    main()
