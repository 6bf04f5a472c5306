"""Shows how much each constant of the default policy matters: halves and doubles it, alone, in scenarios of the arena.

    python -m benchmarks.arena.sweep [--first N] [--count N] [--regime NAME=VALUE ...] [--number N ...]
        [--constant NAME ...] [--jobs N] [--out DIR]

A share above a half can't be doubled. Its distance from 1 is doubled and halved instead. Each run has a process of its
own, in which the constant is set in all modules that have it. Writes DIR/arena_constants.json and .md after each
scenario. Changes are relative to the run with the constants as they are.
"""

from __future__ import annotations

import multiprocessing
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import getsource
from itertools import chain
from pathlib import Path
from pkgutil import walk_packages
from statistics import fmean

from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import aligned
from benchmarks.arena.played import Score, play
from benchmarks.arena.regimes import Regime, draw, numbers_of, wanted_regime
from benchmarks.harness import FOLDER, cpu_name, parser_of, table, write_page

_DEFINED = re.compile(r"^([A-Z][A-Z_]*) = ([\d.]+)$", re.MULTILINE)
# The pool's quad-tree has the same width.
_SHARED = {"LEAF_WIDTH"}
_CONTEXT = multiprocessing.get_context("forkserver")


# ---- constants ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constant:
    module: str
    name: str
    value: float

    def __str__(self) -> str:
        return f"{self.module.removeprefix(aligned.__name__ + '.')}.{self.name}"

    def tried(self) -> tuple[float, float]:
        if 0.5 < self.value < 1:
            return round(2 * self.value - 1, 9), (1 + self.value) / 2
        return self.value // 2 if isinstance(self.value, int) else self.value / 2, 2 * self.value


def constants() -> list[Constant]:
    return [
        Constant(module, name, float(value) if "." in value else int(value))
        for module in _modules()
        for name, value in _DEFINED.findall(getsource(import_module(module)))
        if name not in _SHARED
    ]


def _modules() -> list[str]:
    return [each.name for each in walk_packages(aligned.__path__, f"{aligned.__name__}.")]


def set_to(constant: Constant, value: float) -> list[str]:
    """Sets the constant where it is defined, and in all modules that import it. Returns these modules."""
    others = {each.module for each in constants() if each.name == constant.name and each != constant}
    holders = [each for each in _modules() if hasattr(import_module(each), constant.name)]
    found = [each for each in holders if each not in others]
    for each in found:
        setattr(sys.modules[each], constant.name, value)
    return found


# ---- play -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A scenario with a constant at another value; None: with all constants as they are."""

    regime: Regime
    constant: Constant | None = None
    value: float = 0.0

    def __str__(self) -> str:
        return f"{self.constant}={self.value:g}" if self.constant else "as they are"


def sweep(regimes: Sequence[Regime], tried: Sequence[Constant], num_jobs: int) -> Iterator[dict[Run, Score]]:
    """Yields each scenario's scores."""
    changed = [(constant, value) for constant in tried for value in constant.tried()]
    runs = [[Run(regime), *(Run(regime, *each) for each in changed)] for regime in regimes]
    with _CONTEXT.Pool(num_jobs, maxtasksperchild=1) as pool:
        scores = pool.imap(_play, chain(*runs))
        for each in runs:
            yield {run: next(scores) for run in each}


def _play(run: Run) -> Score:
    if run.constant:
        set_to(run.constant, run.value)
    return play(run.regime)[0]


# ---- changes --------------------------------------------------------------------------------------------------------


def change(constant: Constant, value: float, scores: Sequence[Mapping[Run, Score]]) -> dict[str, object]:
    """Returns what the value changes: real time in time in points; best effort, and the seconds of answers where real
    time has no objectives that can be met, as ratios. The worst answers are the longest."""
    pairs = [
        (run.regime, each[Run(run.regime)], score)
        for each in scores
        for run, score in each.items()
        if (run.constant, run.value) == (constant, value)
    ]
    rt = [100 * (now.in_time - then.in_time) for regime, then, now in pairs if regime.is_feasible]
    be = [_be(now) / _be(then) for _, then, now in pairs if _be(then)]
    answers = [now.answer_s / then.answer_s for regime, then, now in pairs if not regime.is_feasible]
    return {
        "constant": f"`{constant}`",
        "value": f"{constant.value:g}",
        "tried": f"{value:g}",
        "scenarios changed": sum(then != now for _, then, now in pairs),
        "in time, mean": f"{fmean(rt):+.2f}" if rt else "",
        "in time, worst": f"{min(rt):+.1f}" if rt else "",
        "best effort, mean": f"{fmean(be):.3f}" if be else "",
        "best effort, worst": f"{min(be):.3f}" if be else "",
        "answers, mean": f"{fmean(answers):.3f}" if answers else "",
        "answers, worst": f"{max(answers):.3f}" if answers else "",
    }


def _be(score: Score) -> float:
    return score.be_tokens_per_s if score.jobs_in_time is None else score.jobs_in_time


def write(out: Path, tried: Sequence[Constant], scores: Sequence[Mapping[Run, Score]]) -> None:
    changes = [change(each, value, scores) for each in tried for value in each.tried()]
    numbers = [next(iter(each)).regime.number for each in scores]
    words = ["python", "-m", "benchmarks.arena.sweep", "--number", *map(str, numbers)]
    if [*tried] != constants():
        words += ["--constant", *dict.fromkeys(each.name for each in tried)]
    command = shlex.join(words)
    played = {
        number: {str(run): score for run, score in each.items()}
        for number, each in zip(numbers, scores, strict=True)
    }
    told = {"command": command, "machine": cpu_name(), "changes": changes, "scores": played}
    lines = [
        "# Constants of the default policy",
        "",
        f"{len(numbers)} scenarios of the arena in virtual time on {cpu_name()}: `{command}`.",
        "",
        "Each row has one constant at another value. Its figures are changes to the run with the constants as they "
        "are. They are points of real time in time, and ratios of best effort and of the seconds of answers. Answers "
        "count where no objective can be met.",
        "",
        table([*changes[0]], [[*each.values()] for each in changes], 1),
    ]
    write_page(out / "arena_constants", "\n".join(lines) + "\n", told)


def main() -> None:
    parser = parser_of(__doc__, out=FOLDER | {"default": Path()})
    known = constants()
    parser.add_argument("--first", type=int, default=600)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--regime", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--number", type=int, nargs="+", metavar="N")
    parser.add_argument(
        "--constant", nargs="+", choices=sorted({each.name for each in known}), metavar="NAME"
    )
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    try:
        numbers = args.number or numbers_of(wanted_regime(args.regime), args.first, args.count)
        regimes = [draw(number, (), [SchedulingConfig().policy]) for number in numbers]
    except ValueError as error:
        parser.error(str(error))
    tried = [each for each in known if not args.constant or each.name in args.constant]
    _CONTEXT.set_forkserver_preload([play.__module__])
    scores: list[dict[Run, Score]] = []
    for played in sweep(regimes, tried, args.jobs):
        scores.append(played)
        write(args.out, tried, scores)
        print(f"{numbers[len(scores) - 1]:5}  {len(scores)} of {len(numbers)}", flush=True)


if __name__ == "__main__":
    main()
