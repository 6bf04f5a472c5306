"""Plays the scenarios. Writes DIR/arena_live.json after each, and the page."""

from __future__ import annotations

import os
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from alignedserve import demo
from alignedserve.instance.profile.saved import decode
from alignedserve.scheduling.policies import POLICIES
from alignedserve.text.tokenizer import Tokenizer
from benchmarks import arena_live
from benchmarks.arena_live.page import line, write
from benchmarks.arena_live.played import Machine, pace_of, play, profile, threads_of
from benchmarks.arena_live.scenes import LAYOUTS, Scene, draw
from benchmarks.gpu.record import Record, Row
from benchmarks.harness import FOLDER, exit_on_sigterm, facts, parser_of, progress, say
from benchmarks.sim_vs_live.model import larger


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    exit_on_sigterm()
    args.out.mkdir(parents=True, exist_ok=True)
    scenes = [draw(number) for number in range(args.first, args.first + args.count)]
    record = Record(args.out / "arena_live.json", facts())
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


def _parser() -> ArgumentParser:
    parser = parser_of(arena_live.__doc__, out=FOLDER | {"required": True})
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--policies", nargs="+", choices=[*POLICIES], default=["aligned"], metavar="NAME")
    parser.add_argument("--seconds", type=float, default=40.0, help="about how long requests arrive")
    parser.add_argument(
        "--profile-s", type=float, default=6.0, help="seconds for measuring each cost profile"
    )
    return parser


if __name__ == "__main__":
    main()
