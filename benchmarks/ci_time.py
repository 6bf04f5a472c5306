"""How long CI, `make test-all` and `make test` take, from a clean checkout of the commit.

    python -m benchmarks.ci_time [--runs 3] [--skip-ci] [--out FILE]

Each run clones the commit, runs `.ci/run` there, which runs `make test-all` and says how long that took, and then
`make test`. The environments of clients are made anew, from what pip, uv and npm have downloaded before. `--skip-ci`:
only `make test`. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from benchmarks.cpu_vs_vllm import cpu_name

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/ci_time.json"
CI, TEST_ALL, TEST = ".ci/run", "make test-all", "make test"


def run(checkout: Path, command: str, **environment: str) -> float:
    """Returns the seconds that it took. Raises CalledProcessError if it fails."""
    begun_s = time.monotonic()
    subprocess.run(command.split(), cwd=checkout, env=os.environ | environment, check=True, stdout=sys.stderr)
    return time.monotonic() - begun_s


def measure(with_ci: bool) -> dict[str, float]:
    """Seconds by command."""
    with tempfile.TemporaryDirectory(prefix="ci-time-") as directory:
        checkout, record = Path(directory) / "checkout", Path(directory) / "record.json"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(checkout)], check=True)
        found = {}
        if with_ci:
            clients = str(Path(directory) / "clients")
            found[CI] = run(checkout, "bash .ci/run", RECORD=str(record), ALIGNEDSERVE_CLIENTS_DIR=clients)
            found[TEST_ALL] = float(json.loads(record.read_text())["whole_s"])
        else:
            run(checkout, "make .venv/installed")
        return found | {TEST: run(checkout, TEST)}


def medians(rounds: list[Mapping[str, float]]) -> dict[str, float]:
    return {name: median(each[name] for each in rounds) for name in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ci_time", description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--skip-ci", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    rounds: list[Mapping[str, float]] = []
    for number in range(args.runs):
        rounds.append(measure(not args.skip_ci))
        print(f"run {number + 1}: " + ", ".join(f"{name} {each:.0f} s" for name, each in rounds[-1].items()))
        found = {
            "processor": cpu_name(),
            "cores": os.cpu_count(),
            "commit": commit.stdout.strip(),
            "runs_s": rounds,
            "median_s": medians(rounds),
        }
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
