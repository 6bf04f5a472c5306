"""Measures the requested parts on one GPU, in one call, within the given time.

    python -m benchmarks.gpu.run --parts ceilings,step:150,throughput --minutes 9 --out DIR

Parts run in the given order; NAME:SECONDS overrides a part's usual limit. DIR/gpu.json is rewritten after every case,
so a run that is killed keeps its results so far. A failed case is recorded, and the next one runs. A short table is
printed last. --tiny runs everything with tiny models, also on a CPU, to try the scripts out.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from alignedserve.engine.config import QUANTIZATIONS
from benchmarks.gpu.bench import Bench, Options, free_memory
from benchmarks.gpu.record import Record, describe_machine

# The most seconds each part may take. Together they are more than one call has.
PARTS = {
    "ceilings": 30,
    "attention": 90,
    "experts": 30,
    "quantised": 150,
    "step": 150,
    "chunks": 30,
    "host_cost": 45,
    "throughput": 180,
    "moves": 75,
    "link": 30,
    "correct": 45,
    "cost_grid": 120,
}
# Reserved at the end to write and print, whatever a part does.
RESERVE_S = 5.0


def parse_parts(text: str) -> list[tuple[str, float]]:
    chosen = []
    for item in text.split(","):
        name, _, seconds = item.strip().partition(":")
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"part {name!r}: must be one of {', '.join(PARTS)}")
        chosen.append((name, float(seconds) if seconds else float(PARTS[name])))
    return chosen


def run_parts(bench: Bench, parts: Sequence[tuple[str, float]]) -> None:
    for name, budget_s in parts:
        bench.part = name
        bench.part_deadline = time.monotonic() + budget_s
        if not bench.has_time("-", 5.0):
            continue
        begin = time.monotonic()
        try:
            importlib.import_module(f"benchmarks.gpu.{name}").run(bench)
        except Exception:
            bench.fail("-")
        free_memory()
        print(f"-- {name}: {time.monotonic() - begin:.0f} s", flush=True)


def make_bench(
    out: Path, device: torch.device, options: Options, minutes: float, commit: str | None = None
) -> Bench:
    out.mkdir(parents=True, exist_ok=True)
    machine = describe_machine(device)
    record = Record(out / "gpu.json", machine | {"commit": commit or machine["commit"]})
    deadline = time.monotonic() + minutes * 60 - RESERVE_S
    return Bench(device, out, record, options, part_deadline=deadline, deadline=deadline)


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    names = [name for name in args.decode_kernels.split(",") if name]
    options = Options(
        backend=args.backend,
        decode_kernels=tuple(names) or Options.decode_kernels,
        models=tuple(name for name in args.models.split(",") if name),
        quantization=args.quantization,
        is_tiny=args.tiny,
    )
    bench = make_bench(args.out, torch.device(args.device), options, args.minutes, args.commit)
    with ended_after(bench, args.minutes * 60):
        run_parts(bench, args.parts)
    print_table(bench.record)


@contextmanager
def ended_after(bench: Bench, seconds: float) -> Iterator[None]:
    """If anything hangs, even a kernel, the process prints its results and its stack, and exits."""

    def end() -> None:
        faulthandler.dump_traceback(sys.stdout)
        print_table(bench.record)
        sys.stdout.flush()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        bench.record.write()


def print_table(record: Record) -> None:
    print(f"\n{record.machine['device']}, {record.machine['date']}\n{record.table()}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=parse_parts, default=",".join(PARTS), help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto", help="EngineConfig.attention_backend")
    parser.add_argument("--decode-kernels", default="", help="EngineConfig.decode_kernel: those to compare")
    parser.add_argument("--models", default="", help="keep to these presets")
    parser.add_argument(
        "--quantization", choices=QUANTIZATIONS, help="EngineConfig.quantization for `step` and `experts`"
    )
    parser.add_argument("--commit", help="commit of a tree that is not a git checkout")
    parser.add_argument("--tiny", action="store_true")
    return parser


if __name__ == "__main__":
    main()
