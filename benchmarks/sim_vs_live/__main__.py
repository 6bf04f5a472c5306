"""Measures the cases that are asked for; DIR/sim_vs_live.json is written anew after every case, the page at the end."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alignedserve import demo
from alignedserve.scheduling.policies import POLICIES
from alignedserve.sim.world import NO_OVERHEAD
from alignedserve.text.tokenizer import Tokenizer
from benchmarks.gpu.record import ROOT, Record, Row
from benchmarks.progress import progress, say
from benchmarks.sim_vs_live.live import Live, measure
from benchmarks.sim_vs_live.page import line, write
from benchmarks.sim_vs_live.requests import fixed_list
from benchmarks.sim_vs_live.simulated import simulate

# As many requests come before those that count.
NUM_WARMING = 60


@dataclass(frozen=True)
class Load:
    name: str
    # Requests per second; None: all at once.
    rate: float | None
    kv_bytes: int


def loads_of(args: argparse.Namespace) -> dict[str, Load]:
    moderate, high = args.rates
    found = (
        Load("moderate", moderate, 64 << 20),
        Load("high", high, 64 << 20),
        Load("short", high, args.short_kv_bytes),
        Load("burst", None, args.short_kv_bytes),
    )
    return {each.name: each for each in found}


def case(policy: str, load: Load, args: argparse.Namespace, tokenizer: Tokenizer) -> Row:
    head: Row = {"policy": policy, "load": load.name, "rate": load.rate, "kv_bytes": load.kv_bytes}
    warming = fixed_list(tokenizer, load.rate or args.rates[1], NUM_WARMING, seed=1)
    asked = fixed_list(tokenizer, load.rate, args.requests, seed=0)
    begun = os.getloadavg()[0]
    try:
        live = measure(policy, load.kv_bytes, args.profile_s, warming, asked)
    except RuntimeError as error:
        return head | {"error": str(error)}
    return head | {"load_average": begun} | compared(policy, load, live, len(asked))


def compared(policy: str, load: Load, live: Live, count: int) -> Row:
    cost, found = live.profile.cost, {}
    for name, overhead in (("simulated", live.overhead), ("by_profile_alone", NO_OVERHEAD)):
        side = simulate(policy, cost, load.kv_bytes, overhead, live.arrivals, count)
        ratios, paired = live.side.figures.ratios(side.figures), live.side.paired(side)
        found[name] = {"figures": asdict(side.figures), "ratios": ratios, "paired": paired, **side.iterations}
    return {
        "processor": live.profile.facts["device"],
        "live": {"figures": asdict(live.side.figures), **live.side.iterations},
        "client": asdict(live.client),
        "overhead": asdict(live.overhead),
        "profile_waited_share": live.profile.waited_share,
        "profile_errors": {name: error.median for name, error in live.profile.errors.items()},
        **found,
    }


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    tokenizer, loads = Tokenizer.from_directory(demo.MODEL_DIR), loads_of(args)
    for number in range(args.rounds):
        for policy in args.policies:
            for name in args.loads:
                yield {"round": number} | case(policy, loads[name], args, tokenizer)


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    # Whoever stops it does not leave a server behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    args.out.mkdir(parents=True, exist_ok=True)
    record = Record(args.out / "sim_vs_live.json", describe(args))
    with progress(args.rounds * len(args.policies) * len(args.loads), "case") as bar:
        for row in rows_of(args):
            record.add(row)
            bar.update()
            say(line(row))
    write(record.path, args.out)


def describe(args: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    return {
        "command": shlex.join(["python", "-m", "benchmarks.sim_vs_live", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit.stdout.strip() or None,
        "python": platform.python_version(),
        "num_cpus": os.cpu_count(),
        "num_requests": args.requests,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sim_vs_live",
        description="The same requests to a live colocated instance, and in simulation, by policy.",
    )
    loads = ["moderate", "high", "short", "burst"]
    parser.add_argument("--policies", nargs="+", choices=[*POLICIES], default=[*POLICIES], metavar="NAME")
    parser.add_argument("--loads", nargs="+", choices=loads, default=loads, metavar="NAME")
    parser.add_argument("--rates", type=float, nargs=2, default=(8.0, 20.0), metavar=("MODERATE", "HIGH"))
    parser.add_argument("--short-kv-bytes", type=int, default=5 << 19, help="of short and burst")
    parser.add_argument("--requests", type=int, default=400, help="of each case")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--profile-s", type=float, default=10.0, help="to measure the cost profile for")
    parser.add_argument("--out", type=Path, required=True)
    return parser


if __name__ == "__main__":
    main()
