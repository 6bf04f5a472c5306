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

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.beginning_jobs import served
from benchmarks.beginning_jobs.floor import Floor, Job, Machine, Shape, floor
from benchmarks.cpu_vs_vllm import cpu_name, make_model
from benchmarks.linear_vs_torch import measure
from benchmarks.progress import progress, say

SHAPE = Shape(hidden=768, intermediate=2048, layers=12, heads=12, kv_heads=4, head_dim=64, vocab=32000)
JOBS = {
    "long": Job(96, 8000, 100, 100),
    "short": Job(96, 2000, 100, 100),
    "twenty": Job(96, 2000, 100, 100, num_beginnings=20),
    "choices": Job(32, 8000, 0, 100, is_one_prompt=True),
}
MAX_NUM_SEQS = 64
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 3600.0
# Bytes that are read to measure memory: more than any cache.
READ_BYTES = 1 << 30


def machine() -> Machine:
    num_cores = len(os.sched_getaffinity(0))
    flops = 1e9 * measure(512, 5).ours_bfloat16 * num_cores
    torch.set_num_threads(num_cores)
    numbers = torch.from_numpy(np.ones(READ_BYTES // 8))
    seconds = []
    for _ in range(5):
        begun_s = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - begun_s)
    return Machine(flops, READ_BYTES / min(seconds))


def run(python: str, engine: str, model: Path, job: Job, root: Path) -> dict[str, Any]:
    environment = dict(os.environ)
    if engine == "alignedserve":
        environment["PYTHONPATH"] = str(root)
    else:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{(os.cpu_count() or 1) - 1}"
    script = str(Path(__file__).parent / "offline.py")
    command = [python, script, engine, str(model), json.dumps(dataclasses.asdict(job)), str(MAX_NUM_SEQS)]
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        sys.exit(f"{engine} failed: {done.stderr[-2000:]}")
    # An engine may log something after it.
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith('{"seconds"'))
    found: dict[str, Any] = json.loads(line)
    return found


def line_of(name: str, job: Job, least: Floor, rounds: list[dict[str, dict[str, Any]]]) -> str:
    """Returns a row of the table. Ratios are medians of the rounds' ratios."""
    ours = statistics.median(each["ours"]["seconds"] for each in rounds)
    cells = [
        name,
        f"{job.num_out / ours:.0f}",
        f"{job.num_out / least.total_s:.0f}",
        f"{least.total_s / ours:.2f}",
    ]
    for peer in ("before", "vllm"):
        if peer in rounds[0]:
            ratio = statistics.median(each[peer]["seconds"] / each["ours"]["seconds"] for each in rounds)
            cells.append(f"{ratio:.2f}")
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--lines", type=int, help="of each job, but for `choices`")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--served", action="store_true", help="let servers answer the lines")
    parser.add_argument("--before", type=Path, help="another checkout of this project")
    parser.add_argument("--vllm-python")
    parser.add_argument("--out", type=Path, help="a JSON file")
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
        lines = []
        for name, job in jobs.items():
            rounds: list[dict[str, dict[str, Any]]] = []
            for _ in range(args.rounds):
                rounds.append({})
                for engine, (python, module, root) in engines.items():
                    bar.set_description(f"{name}: {engine}")
                    if args.served:
                        rounds[-1][engine] = served.run(module, python, model, job, root, MAX_NUM_SEQS)
                    else:
                        rounds[-1][engine] = run(python, module, model, job, root)
                    bar.update()
                say(f"{name}: {rounds[-1]}")
            least = floor(job, SHAPE, here, MAX_NUM_SEQS)
            lines.append(line_of(name, job, least, rounds))
            found[name] = {
                "job": dataclasses.asdict(job),
                "floor": dataclasses.asdict(least),
                "rounds": rounds,
            }
    heads = [
        "job",
        "tokens/s",
        "floor",
        "of the floor",
        *(f"times {each}" for each in engines if each != "ours"),
    ]
    print("| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1), *lines, sep="\n")
    if args.out:
        about = {
            "date": str(date.today()),
            "processor": cpu_name(),
            "machine": dataclasses.asdict(here),
            "jobs": found,
        }
        args.out.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
