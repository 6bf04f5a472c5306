"""Times jobs of which the lines begin alike, beside the least time that they can take, and beside vLLM for CPU.

    python -m benchmarks.beginning_jobs [--jobs long,short,twenty,choices] [--lines 96] [--rounds 1]
        [--served] [--before CHECKOUT] [--vllm-python VENV/bin/python] [--out FILE]

The model is a random-weight Llama with 125M parameters in bfloat16. Engines run in turn, each time in a new process,
with their prefix caches on. The floor (floor.py) has products at the rate of this project's linear layers with 512
rows, and bytes at the rate at which all cores read memory. Both are measured at the start. `--before` also runs another
checkout of this project. With `--served`, servers answer the lines instead of `LLM` (served.py), and the model has the
demo model's vocabulary. The floor stays that of `LLM`. Nothing is warmed up, and vLLM takes the cores that
VLLM_CPU_OMP_THREADS_BIND names.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.beginning_jobs import served
from benchmarks.beginning_jobs.floor import Floor, Job, Machine, Shape, floor
from benchmarks.cpu_vs_vllm import make_model
from benchmarks.harness import (
    JSON_FILE,
    ROOT,
    cpu_name,
    facts,
    in_turn,
    median_ratio,
    parser_of,
    progress,
    say,
    seconds_of,
    table,
    write_json,
)
from benchmarks.linear_vs_torch import measure

SHAPE = Shape(hidden=768, intermediate=2048, layers=12, heads=12, kv_heads=4, head_dim=64, vocab=32000)
JOBS = {
    "long": Job(96, 8000, 100, 100),
    "short": Job(96, 2000, 100, 100),
    "twenty": Job(96, 2000, 100, 100, num_beginnings=20),
    "choices": Job(32, 8000, 0, 100, is_one_prompt=True),
}
MAX_NUM_SEQS = 64
TIMEOUT_S = 3600.0
# Bytes that are read to measure memory: more than any cache.
READ_BYTES = 1 << 30


def machine() -> Machine:
    num_cores = len(os.sched_getaffinity(0))
    flops = 1e9 * measure(512, 5).ours_bfloat16 * num_cores
    torch.set_num_threads(num_cores)
    numbers = torch.from_numpy(np.ones(READ_BYTES // 8))
    return Machine(flops, READ_BYTES / min(seconds_of(numbers.sum) for _ in range(5)))


def run(engine: str, python: str, model: Path, job: Job, root: Path, max_num_seqs: int) -> dict[str, Any]:
    environment = dict(os.environ)
    if engine == "alignedserve":
        environment["PYTHONPATH"] = str(root)
    else:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{(os.cpu_count() or 1) - 1}"
    script = str(Path(__file__).parent / "offline.py")
    command = [python, script, engine, str(model), json.dumps(dataclasses.asdict(job)), str(max_num_seqs)]
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        sys.exit(f"{engine} failed: {done.stderr[-2000:]}")
    # An engine may log something after it.
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith('{"seconds"'))
    found: dict[str, Any] = json.loads(line)
    return found


def cells_of(
    name: str, job: Job, least: Floor, rounds: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[str]:
    """Returns a row of the table."""
    seconds = {engine: [each["seconds"] for each in found] for engine, found in rounds.items()}
    ours = statistics.median(seconds["ours"])
    rates = f"{job.num_out / ours:.0f}", f"{job.num_out / least.total_s:.0f}"
    ratios = [median_ratio(each, seconds["ours"]) for engine, each in seconds.items() if engine != "ours"]
    return [name, *rates, *(f"{ratio:.2f}" for ratio in (least.total_s / ours, *ratios))]


def main() -> int:
    parser = parser_of(__doc__, rounds=1, out=JSON_FILE)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--lines", type=int, help="of each job, but for `choices`")
    parser.add_argument("--served", action="store_true", help="let servers answer the lines")
    parser.add_argument("--before", type=Path, help="another checkout of this project")
    parser.add_argument("--vllm-python")
    args = parser.parse_args()
    jobs = {name: JOBS[name] for name in args.jobs.split(",")}
    if args.served and any(job.is_one_prompt for job in jobs.values()):
        parser.error("--served: choices of one prompt are no lines; name other --jobs")
    if args.lines:
        jobs = {
            name: job if job.is_one_prompt else dataclasses.replace(job, num_lines=args.lines)
            for name, job in jobs.items()
        }
    engines = {"ours": (sys.executable, "alignedserve", ROOT)}
    if args.before:
        engines["before"] = sys.executable, "alignedserve", args.before.resolve()
    if args.vllm_python:
        engines["vllm"] = args.vllm_python, "vllm", ROOT
    here = machine()
    say(f"{cpu_name()}: {here.flops * 1e-9:.0f} GFLOP/s, {here.bytes_per_s * 1e-9:.1f} GB/s")
    found: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="jobs-", dir="/tmp") as directory,
        progress(len(jobs) * len(engines) * args.rounds, "run") as bar,
    ):
        model = Path(directory)
        if args.served:
            served.make_model(model)
        else:
            make_model(model, max_position_embeddings=16384)
        rows = []
        for name, job in jobs.items():
            say(name)
            runs = {
                engine: partial(
                    served.run if args.served else run, module, python, model, job, root, MAX_NUM_SEQS
                )
                for engine, (python, module, root) in engines.items()
            }
            rounds = in_turn(runs, args.rounds, bar=bar, told=lambda engine, one: say(f"{engine}: {one}"))
            least = floor(job, SHAPE, here, MAX_NUM_SEQS)
            rows.append(cells_of(name, job, least, rounds))
            found[name] = {"job": job, "floor": least, "rounds": rounds}
    peers = [f"times {each}" for each in engines if each != "ours"]
    print(table(["job", "tokens/s", "floor", "of the floor", *peers], rows, 1))
    hidden = {args.vllm_python: "VENV/bin/python", args.before: "CHECKOUT"}
    write_json(args.out, facts(hidden) | {"machine": here, "jobs": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
