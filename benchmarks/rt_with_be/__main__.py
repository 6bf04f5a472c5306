"""Measures the requested parts. Writes DIR/rt_with_be.json after every case, and the page at the end."""

from __future__ import annotations

import subprocess
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from alignedserve.scheduling.policies import POLICIES
from alignedserve.sim.report import Objectives
from benchmarks import rt_with_be
from benchmarks.gpu.record import Record
from benchmarks.harness import FOLDER, exit_on_sigterm, facts, parser_of, progress, say
from benchmarks.rt_with_be import peer
from benchmarks.rt_with_be.arithmetic import Row
from benchmarks.rt_with_be.live import Live
from benchmarks.rt_with_be.page import line, terminal_table, write
from benchmarks.rt_with_be.simulated import Simulated, Workload

PARTS = ("sim", "bursts", "goodput", "exact", "live", "live_bursts", "live_exact")


def rows_of(part: str, args: Namespace) -> Iterator[Row]:
    live = Live(
        args.rt_rate, args.window, args.lines, vllm_python=args.vllm_python, num_colocated=args.colocated
    )
    with_peers = [*args.policies, *(peer.POLICIES if args.vllm_python else ())]
    slo_s = None if args.slo_ms is None else (args.slo_ms[0] / 1e3, args.slo_ms[1] / 1e3)
    slo = None if slo_s is None else Objectives(*slo_s)
    match part:
        case "live":
            return live.rounds(with_peers, args.rounds, slo_s)
        case "live_bursts":
            return live.bursts(with_peers, slo_s)
        case "live_exact":
            return live.exact(args.policies)
    simulated = Simulated(Workload.of_trace(args.trace) if args.trace else Workload.made_up())
    match part:
        case "sim":
            return simulated.table(args.policies, slo)
        case "bursts":
            return simulated.bursts(args.policies, slo)
        case "goodput":
            return simulated.goodput(args.policies, slo)
        case _:
            return simulated.exact(args.policies)


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    exit_on_sigterm()
    args.out.mkdir(parents=True, exist_ok=True)
    record = Record(args.out / "rt_with_be.json", describe(args))
    with progress(None, "case") as bar:
        for number, part in enumerate(args.parts, 1):
            bar.set_description(f"{part}, part {number} of {len(args.parts)}")
            begun_s = time.monotonic()
            for row in rows_of(part, args):
                record.add(row | {"took_s": round(time.monotonic() - begun_s, 1)})
                begun_s = time.monotonic()
                bar.update()
                say(line(row))
    print(terminal_table(record.rows))
    write([record.path], args.out)


def describe(args: Namespace) -> dict[str, Any]:
    return facts({args.vllm_python: "VENV/bin/python"}) | {
        "rt_rate": args.rt_rate,
        "window_s": args.window,
        "lengths": args.trace.name if args.trace else "log-normal",
        "vllm": _vllm_version(args.vllm_python) if args.vllm_python else None,
    }


def _vllm_version(python: Path) -> str:
    """Returns the version. Raises CalledProcessError if there is no vLLM."""
    code = "import vllm; print(vllm.__version__)"
    return subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def _parser() -> ArgumentParser:
    parser = parser_of(rt_with_be.__doc__, rounds=2, out=FOLDER | {"required": True})
    parser.add_argument("--parts", type=_names(PARTS), default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--policies", type=_names(POLICIES), default=list(POLICIES), help=", ".join(POLICIES))
    parser.add_argument("--rt-rate", type=float, default=2.0, help="live: real-time requests per second")
    parser.add_argument("--window", type=float, default=16.0, help="live: seconds per case")
    parser.add_argument(
        "--colocated", type=int, default=0, help="live: number of colocated instances, instead of 1+1"
    )
    parser.add_argument("--lines", type=int, default=1500, help="live: lines of the batch job")
    parser.add_argument(
        "--slo-ms",
        type=float,
        nargs=2,
        metavar=("TTFT", "TBT"),
        help="objectives [default: 1.25 times RT's p99 alone]",
    )
    parser.add_argument(
        "--vllm-python",
        type=Path,
        help=f"Python with vLLM for CPU: live also measures {', '.join(peer.POLICIES)}",
    )
    parser.add_argument("--trace", type=Path, help="simulated: take lengths from a trace in Azure's format")
    return parser


def _names(known: Sequence[str] | dict[str, Any]) -> Any:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in known:
                raise ArgumentTypeError(f"{name!r}: must be one of {', '.join(known)}")
        return names

    return parse


if __name__ == "__main__":
    main()
