"""What benchmarks share: their options, the facts of a run, tables and result files, progress, and rounds in turn."""

from __future__ import annotations

import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

ROOT = Path(__file__).parents[1]
# What `--out` names.
JSON_FILE = {"help": "write the results to this file as JSON"}
PAGE_AND_JSON = {"help": "base name of FILE.md and FILE.json"}
FOLDER = {"help": "directory of the results", "metavar": "DIR"}

_Name = TypeVar("_Name")
_Result = TypeVar("_Result")


# ---- options ---------------------------------------------------------------------------------------------------------


def parser_of(
    doc: str | None, *, rounds: int | None = None, out: Mapping[str, Any] | None = None
) -> ArgumentParser:
    """Returns a parser with the module's docstring. `rounds`: the default of `--rounds`. `out`: what `--out` names.
    tests/test_docs.py takes the keywords of a call for the options that it adds."""
    _begun()
    # As argparse itself has it from Python 3.14 on.
    program = shlex.join(["python", *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]])
    parser = ArgumentParser(program, description=doc, formatter_class=RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    if out is not None:
        parser.add_argument("--out", type=Path, **out)
    return parser


def exit_on_sigterm() -> None:
    """Makes SIGTERM raise SystemExit, so that servers are stopped as well when this process is."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


# ---- facts -----------------------------------------------------------------------------------------------------------


def facts(hidden: Mapping[Path | str | None, str] | None = None) -> dict[str, Any]:
    """Returns where results come from. `hidden`: paths in the command, and what to write in place of them."""
    begun_s, commit = _begun()
    return {
        "command": command(hidden or {}),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun_s)),
        "commit": commit,
        "python": platform.python_version(),
        "processor": cpu_name(),
        "num_cpus": os.cpu_count(),
    }


def command(hidden: Mapping[Path | str | None, str]) -> str:
    """Returns the command line of this process."""
    names = {str(path): name for path, name in hidden.items() if path}

    def shown(word: str) -> str:
        option, equals, value = word.partition("=")
        return option + equals + names.get(value, value) if equals else names.get(word, word)

    return shlex.join(["python", *map(shown, sys.orig_argv[1:])])


@cache
def _begun() -> tuple[float, str | None]:
    """Returns when the benchmark began, and the commit at that time."""
    return time.time(), commit_of()


def commit_of(root: Path = ROOT) -> str | None:
    """Returns None if this is not a git checkout."""
    words = ["git", "-C", str(root), "rev-parse", "--verify", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def cpu_name() -> str:
    """Returns the processor's name and the number of its cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x {len(names)}" if names else "unknown"


# ---- results ---------------------------------------------------------------------------------------------------------


def heading(title: str, about: Mapping[str, Any], *more: str) -> str:
    """Returns the title of a page, and what it was measured with. `about`: the facts. `more`: what else to tell."""
    commit = f"commit {str(about['commit'])[:12]}"
    told = (f"`{about['command']}`", about["date"], commit, about["processor"], *more)
    return f"# {title}\n\n{', '.join(told)}"


def table(head: Sequence[str], rows: Iterable[Sequence[object]], num_names: int | None = None) -> str:
    """Returns a table in Markdown. All columns after the first `num_names` are numbers, and flush right."""
    num_left = len(head) if num_names is None else num_names
    marks = ["---"] * num_left + ["---:"] * (len(head) - num_left)
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, marks, *rows))


def publish(base: Path | None, page: str, content: Mapping[str, Any]) -> None:
    """Prints the page, and writes BASE.md and BASE.json."""
    say(page)
    write_page(base, page, content)


def write_page(base: Path | None, page: str, content: object) -> None:
    """Writes BASE.md and BASE.json."""
    if base is not None:
        write_json(base.with_suffix(".json"), content)
        base.with_suffix(".md").write_text(page)


def write_json(path: Path | None, content: object) -> None:
    """Writes the file if there is a path. Dataclasses become objects."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, default=asdict) + "\n")


def append_json(path: Path | None, content: object) -> None:
    """Prints a line of JSON, and appends it to the file if there is a path."""
    line = json.dumps(content)
    print(line)
    if path is not None:
        with path.open("a") as file:
            file.write(line + "\n")


# ---- progress --------------------------------------------------------------------------------------------------------


def progress(total: int | None, unit: str) -> tqdm[Any]:
    """Returns a bar on stderr. Its description names the current work, and is shown as soon as it is set."""
    return tqdm(total=total, unit=unit, dynamic_ncols=True, mininterval=0, file=sys.stderr)


def say(line: str) -> None:
    """Prints a result on stdout immediately, above the bar if both are on one terminal."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


# ---- rounds ----------------------------------------------------------------------------------------------------------


def in_turn(
    runs: Mapping[_Name, Callable[[], _Result]],
    num_rounds: int,
    *,
    num_warm_ups: int = 0,
    bar: tqdm[Any] | None = None,
    told: Callable[[_Name, _Result], None] | None = None,
) -> dict[_Name, list[_Result]]:
    """Runs each once per round (A B A B), so that other load on the machine slows all of them. Returns the results by
    round, without those of warm-ups, which come first. `told` gets each of them as soon as it is there."""
    found: dict[_Name, list[_Result]] = {name: [] for name in runs}
    for number in range(num_warm_ups + num_rounds):
        for name, run in runs.items():
            if bar is not None:
                bar.set_description(str(name))
            result = run()
            if bar is not None:
                bar.update()
            if number >= num_warm_ups:
                found[name].append(result)
                if told is not None:
                    told(name, result)
    return found


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Returns the median of the rounds' ratios."""
    return statistics.median(one / other for one, other in zip(over, under, strict=True))


def seconds_of(run: Callable[..., object], *arguments: object) -> float:
    """Returns the seconds of a call."""
    begun_s = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - begun_s
