"""Plays the scenarios. Writes DIR/arena_live.json after each, and the page."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from alignedserve import demo
from alignedserve.instance.profile.saved import decode
from alignedserve.scheduling.policies import POLICIES
from alignedserve.text.tokenizer import Tokenizer
from benchmarks.arena_live.page import line, write
from benchmarks.arena_live.played import Machine, pace_of, play, profile, threads_of
from benchmarks.arena_live.scenes import LAYOUTS, Scene, draw
from benchmarks.cpu_vs_vllm import cpu_name
from benchmarks.gpu.record import Record, Row
from benchmarks.progress import progress, say
from benchmarks.sim_vs_live.model import larger


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    # Stops the server as well when this process is stopped.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    args.out.mkdir(parents=True, exist_ok=True)
    scenes = [draw(number) for number in range(args.first, args.first + args.count)]
    record = Record(args.out / "arena_live.json", _about())
    with tempfile.TemporaryDirectory(prefix="arena-live-", dir="/tmp") as name:
        folder = Path(name)
        model, tokenizer = larger(folder), Tokenizer.from_directory(demo.MODEL_DIR)
        machine = Machine(model, tokenizer, {}, {})
        for num_threads in sorted({threads_of(scene.layout) for scene in scenes}):
            path = profile(machine, num_threads, args.profile_s, folder)
            machine.profiles[num_threads] = path
            machine.costs[num_threads] = decode(path.read_bytes(), str(path)).cost
        paces = {each: pace_of(machine, each) for each in LAYOUTS if each in {one.layout for one in scenes}}
        with progress(len(scenes) * len(args.policies), "scenario") as bar:
            for scene in scenes:
                for policy in args.policies:
                    row = _row(machine, scene, policy, paces[scene.layout], args.seconds)
                    record.add(row)
                    bar.update()
                    say(line(row))
    write(record.path)


def _row(machine: Machine, scene: Scene, policy: str, pace: float, seconds: float) -> Row:
    head: Row = {"policy": policy, "scene": asdict(scene) | {"layout": str(scene.layout)}}
    head["load_average"] = os.getloadavg()[0]
    try:
        return head | asdict(play(machine, scene, policy, pace, seconds))
    except RuntimeError as error:
        return head | {"error": str(error)}


def _about() -> Row:
    return {
        "command": shlex.join(["python", "-m", "benchmarks.arena_live", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "processor": cpu_name(),
        "num_cpus": os.cpu_count(),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.arena_live",
        description="Scenarios like the arena's on live processes, and beside each in simulation.",
    )
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--policies", nargs="+", choices=[*POLICIES], default=["aligned"], metavar="NAME")
    parser.add_argument("--seconds", type=float, default=40.0, help="about how long requests arrive")
    parser.add_argument(
        "--profile-s", type=float, default=6.0, help="seconds for measuring each cost profile"
    )
    parser.add_argument("--out", type=Path, required=True)
    return parser


if __name__ == "__main__":
    main()
