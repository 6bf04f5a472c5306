"""Counts the KV blocks that a job of lines with a common prefix has in use, in the pool and in a decode instance.

    python -m benchmarks.beginning_jobs.blocks [--before CHECKOUT] [--lines 32] [--at-once 16] [--out FILE]

`serve` runs the job on one prefill and one decode instance. The counts are the highest of those that `/v1/cluster` had
meanwhile. `--before` also runs another checkout of this project.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx2

from benchmarks.beginning_jobs import served
from benchmarks.beginning_jobs.floor import Job
from benchmarks.harness import JSON_FILE, ROOT, commit_of, facts, parser_of, say, write_json
from benchmarks.prefix_caching import ours
from benchmarks.rt_with_be import traffic

MEMORY_BYTES = 6 << 30


def run(model: Path, job: Job, at_once: int, root: Path) -> dict[str, int]:
    """Returns the most blocks in use at a time, by role."""
    options = (
        *("--max-num-seqs", str(at_once), "--batch-max-num-lines", str(2 * at_once), "--dtype", "bfloat16"),
        *("--max-model-len", str(job.common + job.own + job.out + 16)),
        *("--kv-cache-memory-bytes", str(MEMORY_BYTES), "--pool-memory-bytes", str(MEMORY_BYTES)),
        *("--prefill-instances", "1", "--decode-instances", "1"),
    )
    asked = {f"line-{number}": body for number, body in enumerate(served.bodies(job))}
    most: Counter[str] = Counter()
    with (
        ours(model, *options, checkout=root) as url,
        httpx2.Client(base_url=url.removesuffix("/v1"), timeout=served.TIMEOUT_S) as http,
    ):
        running = traffic.Job(http, asked, endpoint=served.ENDPOINT)
        while running.look()["status"] not in traffic.OVER:
            for process in http.get("/v1/cluster").raise_for_status().json()["processes"]:
                most[process["role"]] = max(most[process["role"]], process["blocks"]["used"])
            time.sleep(traffic.LOOK_S)
        counts = running.counts()
    if counts["completed"] != job.num_lines:
        raise RuntimeError(f"the job has not been answered entirely: {counts}")
    return {role: most[role] for role in ("kvpool", "decode")}


def main() -> None:
    parser = parser_of(__doc__, out=JSON_FILE)
    parser.add_argument("--before", type=Path, help="another checkout of this project")
    parser.add_argument("--lines", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=16)
    args = parser.parse_args()
    job = Job(args.lines, common=8000, own=100, out=100)
    roots = {"ours": ROOT} | ({"before": args.before.resolve()} if args.before else {})
    with tempfile.TemporaryDirectory(prefix="blocks-", dir="/tmp") as directory:
        served.make_model(Path(directory))
        found = {name: run(Path(directory), job, args.at_once, root) for name, root in roots.items()}
    for name, blocks in found.items():
        say(f"{name}: {blocks}")
    more = {
        "lines": args.lines,
        "at once": args.at_once,
        "commits": {name: commit_of(root) for name, root in roots.items()},
        "most blocks": found,
    }
    write_json(args.out, facts({args.before: "CHECKOUT"}) | more)


if __name__ == "__main__":
    main()
