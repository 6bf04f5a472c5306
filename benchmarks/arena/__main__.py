"""Compares all policies in virtual time, in scenarios drawn from numbers.

    python -m benchmarks.arena [--first N] [--count N] [--regime NAME=VALUE ...] [--given NAME=VALUE ...]
        [--curve N] [--policy NAME ...] [--baselines] [--traces DIR] [--jobs N] [--out DIR] [--again NAME ...] [--gate]

A scenario consists of instances with a model and device, traffic with its rate, and objectives (`regimes.py`). Options:

    --regime objectives=tight   only scenarios with this value, the next ones from N on
    --given pace=1.3            all scenarios have this value, whatever their numbers draw; here iterations take
                                1.3 times what policies expect
    --curve 7                   only scenario 7, at loads from half to twice the capacity
    --baselines                 also the papers' own baselines (`baselines.py`)
    --traces DIR                a quarter of the scenarios take arrivals and lengths from a trace in that directory
    --again NAME                recomputes that policy's scores; others are computed if DIR has none of the same
                                scenario and code
    --gate                      recomputes the default's scores; exit status 1 if it is too far behind (`gate.py`)

Scores are written to DIR/arena.jsonl as soon as they are known. Writes arena.md and arena.png, or curve-N.md and
curve-N.png. A policy that raises an error in a scenario does not stop the others, but the exit status is then 1.
"""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import POLICIES
from alignedserve.sim.jsonl_trace import read_trace
from benchmarks.arena.baselines import BASELINES, path_of
from benchmarks.arena.curve import LOADS, curve_page, falls, plot_curve
from benchmarks.arena.gate import failures
from benchmarks.arena.page import page
from benchmarks.arena.played import Score, play
from benchmarks.arena.plots import plot
from benchmarks.arena.record import Record, key_of
from benchmarks.arena.regimes import (
    Regime,
    as_text,
    dice_of,
    draw,
    numbers_of,
    wanted_regime,
    with_values,
)
from benchmarks.arena.regret import Judged, judge
from benchmarks.harness import FOLDER, cpu_name, parser_of

DEFAULT = SchedulingConfig().policy


def main() -> None:
    args = _args()
    record = Record(args.out / "arena.jsonl")
    record.forget([*args.again, *([DEFAULT] if args.gate else [])])
    regimes, failed = _drawn(args)
    failed |= play_missing(regimes, args.policy, record, args.jobs)
    # The others are compared with the default, so a scenario without its score is not judged.
    judged = [
        judge(each, record.of(each, args.policy)) for each in regimes if key_of(each, DEFAULT) in record
    ]
    found = _write(judged, failed, args) if judged else []
    for failure in found:
        print(failure)
    for place, error in failed.items():
        print(f"{place}: {error}", file=sys.stderr)
    sys.exit(1 if failed or (args.gate and found) else 0)


def _write(judged: Sequence[Judged], failed: Mapping[str, str], args: Namespace) -> list[str]:
    """Writes the page and the plot. Returns where the default is too far behind."""
    args.out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "benchmarks.arena", *_told(args)])
    if args.curve is None:
        (args.out / "arena.md").write_text(page(judged, DEFAULT, cpu_name(), command, failed))
        plot(judged, DEFAULT, args.out / "arena.png")
        return failures(judged, DEFAULT)
    (args.out / f"curve-{args.curve}.md").write_text(curve_page(judged, cpu_name(), command))
    plot_curve(judged, DEFAULT, args.out / f"curve-{args.curve}.png")
    return falls(judged, DEFAULT)


# ---- options --------------------------------------------------------------------------------------------------------


def _args() -> Namespace:
    parser = parser_of(__doc__, out=FOLDER | {"default": Path()})
    known = [*POLICIES, *BASELINES]
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--regime", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--given", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--curve", type=int, metavar="N")
    parser.add_argument("--policy", nargs="+", choices=known, default=list(POLICIES), metavar="NAME")
    parser.add_argument("--baselines", action="store_true")
    parser.add_argument("--traces", type=Path, metavar="DIR")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--again", nargs="+", choices=known, default=[], metavar="NAME")
    parser.add_argument("--gate", action="store_true")
    args = parser.parse_args()
    if DEFAULT not in args.policy:
        parser.error(f"--policy: must name {DEFAULT}, which the others are compared with")
    if args.count < 1:
        parser.error(f"--count {args.count}: must be at least 1")
    if args.baselines:
        args.policy = list(dict.fromkeys([*args.policy, *BASELINES]))
    try:
        args.found = found_traces(args.traces) if args.traces else ()
        args.values = wanted_regime(args.given, args.found, may_be_given=True)
        args.numbers = _numbers(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _numbers(args: Namespace) -> list[int]:
    """Returns the scenarios' numbers. Raises ValueError for values that do not exist."""
    regime = wanted_regime(args.regime, args.found)
    first = args.first if args.curve is None else args.curve
    with_values(dice_of(first, args.found), args.values)
    return [first] if args.curve is not None else numbers_of(regime, first, args.count, args.found)


def found_traces(folder: Path) -> tuple[Path, ...]:
    """Returns the traces in a directory, and prints the names of its other files. Raises ValueError if there is no
    trace."""
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


def _told(args: Namespace) -> list[str]:
    numbers = ["--first", str(args.first), "--count", str(args.count)]
    return [
        *(numbers if args.curve is None else ["--curve", str(args.curve)]),
        *(["--regime", *args.regime] if args.regime else []),
        *(["--given", *args.given] if args.given else []),
        *(["--policy", *args.policy] if args.policy != [*POLICIES] else []),
        *(["--traces", str(args.traces)] if args.traces else []),
    ]


# ---- play -----------------------------------------------------------------------------------------------------------


def _drawn(args: Namespace) -> tuple[list[Regime], dict[str, str]]:
    """Returns the scenarios, and the errors of those that can't be drawn."""
    curve = [{}] if args.curve is None else [{"load": as_text(load)} for load in LOADS]
    drawn, failed = list[Regime](), dict[str, str]()
    for number in args.numbers:
        for given in curve:
            try:
                drawn.append(draw(number, args.found, args.policy, args.values | given))
            except ValueError as error:
                failed[f"scenario {number}"] = str(error)
    return drawn, failed


@dataclass(frozen=True)
class _Run:
    """One policy in one scenario."""

    regime: Regime
    policy: str

    def __str__(self) -> str:
        return f"scenario {self.regime.number}, {self.policy}"


def play_missing(
    regimes: Sequence[Regime], policies: Sequence[str], record: Record, num_jobs: int
) -> dict[str, str]:
    """Plays what has no recorded score, and prints a line per scenario. Returns errors by scenario and policy."""
    missing = {
        each: [policy for policy in policies if key_of(each, policy) not in record] for each in regimes
    }
    failed = dict[str, str]()
    for run, result in _results(missing, num_jobs):
        key = key_of(run.regime, run.policy)
        if isinstance(result, Score):
            record.add(key, result)
        else:
            failed[str(run)] = result
            record.failed(key, result)
        missing[run.regime].remove(run.policy)
        scores = record.of(run.regime, policies)
        if not missing[run.regime] and any(each.policy == DEFAULT for each in scores):
            print(_line(judge(run.regime, scores)), flush=True)
    return failed


def _results(missing: Mapping[Regime, Sequence[str]], num_jobs: int) -> Iterator[tuple[_Run, Score | str]]:
    """Yields each score or error as soon as it is known."""
    with ProcessPoolExecutor(num_jobs) as pool:
        running = {
            pool.submit(_play, run): run
            for run in [_Run(regime, policy) for regime, policies in missing.items() for policy in policies]
        }
        for done in as_completed(running):
            yield running[done], _result(done)


def _result(done: Future[Score]) -> Score | str:
    error = done.exception()
    return done.result() if error is None else f"{type(error).__name__}: {error}"


def _play(run: _Run) -> Score:
    config = replace(run.regime.config, policy=(path_of(run.policy),))
    return play(replace(run.regime, config=config))[0]


def _line(judged: Judged) -> str:
    regime, own = judged.regime, judged.verdicts[DEFAULT]
    best = max(judged.scores, key=lambda score: score.in_time)
    be = "" if own.be_share is None else f", best effort {own.be_share:.2f} of the most"
    answers = "" if own.answer_share is None else f", answers {own.answer_share:.2f} of the shortest"
    return (
        f"{regime.number:5}  {regime.layout_name}, {regime.machine}, {regime.lengths}, {regime.load:g} of what fits, "
        f"{regime.objectives}, {regime.best_effort}: {DEFAULT} {100 * (best.in_time - own.regret):.1f} % in time, "
        f"{best.policy} {100 * best.in_time:.1f} %{be}{answers}"
    )


if __name__ == "__main__":
    main()
