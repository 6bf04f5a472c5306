"""Sets all policies against each other, in scenarios drawn from numbers and in virtual time.

    python -m benchmarks.arena [--first N] [--count N] [--regime NAME=VALUE ...] [--policy NAME ...] [--traces DIR]
        [--jobs N] [--out DIR] [--again NAME ...] [--gate]

A scenario says what instances there are and of what model and device, what comes and how fast, and what is asked for
(`regimes.py`). `--regime objectives=tight`: only scenarios that have this, the next ones from N on. With `--traces`, a
quarter of them take arrivals and lengths from a trace in that directory. Scores are written as soon as they are known;
those of DIR that are there already are not made again, but for the policies that `--again` names. Writes arena.jsonl,
arena.md and arena.png. `--gate`: exit status 1 where the default is too far behind (`gate.py`).
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import POLICIES
from alignedserve.sim.jsonl_trace import read_trace
from benchmarks.arena.gate import failures
from benchmarks.arena.page import page
from benchmarks.arena.played import Score, play
from benchmarks.arena.plots import plot
from benchmarks.arena.record import Record
from benchmarks.arena.regimes import draw, numbers_of, wanted_regime
from benchmarks.arena.regret import Judged, judge
from benchmarks.cpu_vs_vllm import cpu_name

DEFAULT = SchedulingConfig().policy


def main() -> None:
    args = _args()
    traces, numbers = args.found, args.numbers
    record = Record(args.out / "arena.jsonl")
    record.forget(args.again)
    missing = {number: record.missing(number, args.policy) for number in numbers}
    for number, scores in _played(missing, traces, args.jobs):
        record.add(number, scores)
        print(_line(judge(draw(number, traces), record.of(number, args.policy))), flush=True)
    judged = [judge(draw(number, traces), record.of(number, args.policy)) for number in numbers]
    args.out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "benchmarks.arena", *_told(args)])
    (args.out / "arena.md").write_text(page(judged, DEFAULT, cpu_name(), command))
    plot(judged, DEFAULT, args.out / "arena.png")
    found = failures(judged, DEFAULT)
    for failure in found:
        print(failure)
    sys.exit(1 if args.gate and found else 0)


def _args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.arena", description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--regime", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--policy", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--traces", type=Path, metavar="DIR")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR")
    parser.add_argument("--again", nargs="+", choices=list(POLICIES), default=[], metavar="NAME")
    parser.add_argument("--gate", action="store_true")
    args = parser.parse_args()
    if DEFAULT not in args.policy:
        parser.error(f"--policy: must name {DEFAULT}, which the others are compared with")
    if args.count < 1:
        parser.error(f"--count {args.count}: must be at least 1")
    try:
        args.found = found_traces(args.traces) if args.traces else ()
        regime = wanted_regime(args.regime, args.found)
        draw(args.first, args.found)
        args.numbers = numbers_of(regime, args.first, args.count, args.found)
    except ValueError as error:
        parser.error(str(error))
    return args


def found_traces(folder: Path) -> tuple[Path, ...]:
    """The traces of a directory. Its other files are named; if there is no trace, ValueError is raised."""
    found = []
    for path in sorted(folder.glob("*.csv")) + sorted(folder.glob("*.jsonl")):
        try:
            read_trace(path)
            found.append(path)
        except ValueError as error:
            print(f"Left out: {error}", file=sys.stderr)
    if not found:
        raise ValueError(f"traces={str(folder)!r}: there is no trace in .csv or .jsonl")
    return tuple(found)


def _told(args: argparse.Namespace) -> list[str]:
    return [
        *("--first", str(args.first), "--count", str(args.count)),
        *(["--regime", *args.regime] if args.regime else []),
        *(["--policy", *args.policy] if args.policy != [*POLICIES] else []),
        *(["--traces", str(args.traces)] if args.traces else []),
    ]


def _played(
    missing: Mapping[int, Sequence[str]], traces: tuple[Path, ...], num_jobs: int
) -> Iterator[tuple[int, list[Score]]]:
    """`missing`: by scenario, which policies are to be tried."""
    with ProcessPoolExecutor(num_jobs) as pool:
        running = {
            pool.submit(_play, number, traces, tuple(policies)): number
            for number, policies in missing.items()
            if policies
        }
        for done in as_completed(running):
            yield running[done], done.result()


def _play(number: int, traces: tuple[Path, ...], policies: tuple[str, ...]) -> list[Score]:
    return play(draw(number, traces, policies))


def _line(judged: Judged) -> str:
    regime, own = judged.regime, judged.verdicts[DEFAULT]
    best = max(judged.scores, key=lambda score: score.in_time)
    be = "" if own.be_share is None else f", best effort {own.be_share:.2f} of the most"
    return (
        f"{regime.number:5}  {regime.layout_name}, {regime.machine}, {regime.lengths}, {regime.load:g} of what fits, "
        f"{regime.objectives}, {regime.best_effort}: {DEFAULT} {100 * (best.in_time - own.regret):.1f} % in time, "
        f"{best.policy} {100 * best.in_time:.1f} %{be}"
    )


if __name__ == "__main__":
    main()
