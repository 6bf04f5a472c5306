"""Runs the most important GPU checks in one unattended call, the most doubtful first.

    python -m benchmarks.gpu.prepare --python 3.12 --out .gpu       before, where there is a package index
    python -m benchmarks.gpu.first --prepared .gpu --minutes 8 --out DIR

Each part is its own process with a time limit. When the limit is over, it is killed with everything that it started,
and the next part runs. DIR/first.json is rewritten after each part, DIR/first.log has the end of each part's output,
and a table is printed last. --tiny runs everything on a CPU with tiny models. `--again DIR/first.json` reruns the parts
that did not end well there: they failed, were stopped, skipped or not begun, or have a case that failed or was skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from alignedserve.launch.leftovers import descendants
from benchmarks.footprint import start_of
from benchmarks.gpu.record import Row, is_measured, summary

ROOT = Path(__file__).parents[2]
RECORD = "gpu.json"
# A part that is stopped gets this time to write its results.
GRACE_S = 8.0
# No part is begun with less time than this.
LEAST_S = 10.0
# Reserved at the end to write and print.
RESERVE_S = 3.0
MAX_LOG_CHARS = 400_000


@dataclass(frozen=True)
class Part:
    name: str
    seconds: float
    module: str
    arguments: tuple[str, ...] = ()


def _run(parts: str, *arguments: str) -> tuple[str, tuple[str, ...]]:
    return "benchmarks.gpu.run", ("--parts", parts, *arguments)


PARTS = (
    Part("kernels", 110, "benchmarks.gpu.kernel_tests"),
    Part("serves", 130, "benchmarks.gpu.serves"),
    Part("correct", 60, *_run("correct")),
    Part("beside", 240, "benchmarks.gpu.beside"),
    Part("steps", 40, *_run("step:25,chunks:15", "--models", "llama-3.1-8b")),
    Part("int8", 40, *_run("step", "--models", "llama-3.1-8b", "--quantization", "int8")),
    Part("int4", 40, *_run("step", "--models", "llama-3.1-8b", "--quantization", "int4")),
    Part("fp8", 40, *_run("step", "--models", "llama-3.1-8b", "--quantization", "fp8")),
    Part("mixture", 60, *_run("step", "--models", "qwen3-30b-a3b")),
    Part("window", 45, *_run("step,chunks", "--models", "gemma-3-4b")),
    Part("attention", 60, *_run("attention")),
)
NAMES = tuple(part.name for part in PARTS)


@dataclass
class Ended:
    part: str
    took_s: float
    # "ended", "failed", "stopped" at its limit, or "skipped".
    how: str
    machine: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    # The end of its output if it did not end well.
    words: str = ""

    @property
    def is_wrong(self) -> bool:
        """Returns whether it failed, was stopped, or has a failed case. A skipped part is not wrong."""
        return self.how in ("failed", "stopped") or not all(map(is_right, self.rows))

    def lines(self) -> list[str]:
        head = f"{self.part:<10} {self.how}, {self.took_s:.0f} s" + (f": {self.words}" if self.words else "")
        return [head, *(f"  {row['case']:<46} {summary(row)}" for row in self.rows)]


class First:
    def __init__(self, out: Path, options: Sequence[str], minutes: float) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._out = out
        self._options = options
        self._deadline = time.monotonic() + 60 * minutes - RESERVE_S
        self._asked: list[str] = []
        self.ended: list[Ended] = []

    def run(self, parts: Sequence[Part]) -> None:
        self._asked = [part.name for part in parts]
        for part in parts:
            left_s = self._deadline - time.monotonic() - GRACE_S
            if left_s < min(part.seconds, LEAST_S):
                ended = Ended(part.name, 0.0, "skipped")
            else:
                ended = self._carry_out(part, min(part.seconds, left_s))
            self.ended.append(ended)
            self._write()
            print("\n".join(ended.lines()), flush=True)

    def _carry_out(self, part: Part, limit_s: float) -> Ended:
        # The path of a socket must be short.
        with tempfile.TemporaryDirectory(prefix="gpu-", dir="/tmp", ignore_cleanup_errors=True) as name:
            out, log = Path(name), Path(name) / "log"
            # A part gets less time than its limit, so that it can end by itself.
            minutes = str(max(limit_s - GRACE_S, LEAST_S / 2) / 60)
            command = [sys.executable, "-m", part.module, *part.arguments, *self._options]
            begun_s = time.monotonic()
            with log.open("wb") as file:
                status = run_within([*command, "--minutes", minutes, "--out", name], file, limit_s)
            took_s = time.monotonic() - begun_s
            said = log.read_text(errors="replace")
            self._keep_log(part, said)
            how = "stopped" if status is None else "failed" if status else "ended"
            words = "" if how == "ended" else " ".join(said.split())[-300:]
            return Ended(part.name, took_s, how, *read_record(out / RECORD), words)

    def _keep_log(self, part: Part, said: str) -> None:
        with (self._out / "first.log").open("a") as file:
            file.write(f"==== {part.name}\n{said[-MAX_LOG_CHARS:]}\n")

    def _write(self) -> None:
        machine = next((each.machine for each in self.ended if each.machine), {})
        parts = [
            {"part": each.part, "took_s": round(each.took_s, 1), "how": each.how, "words": each.words}
            | {"command": each.machine.get("command"), "rows": each.rows}
            for each in self.ended
        ]
        head = machine | {"command": shlex.join(["python", "-m", "benchmarks.gpu.first", *sys.argv[1:]])}
        unfinished = self._out / "first.part"
        unfinished.write_text(json.dumps(head | {"asked": self._asked, "parts": parts}, indent=1))
        os.replace(unfinished, self._out / "first.json")

    def table(self) -> str:
        return "\n".join(line for each in self.ended for line in each.lines())


def run_within(command: Sequence[str], log: Any, limit_s: float) -> int | None:
    """Returns the exit status of a command, or None if it was stopped. Then everything it started is killed."""
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
    )
    started: set[tuple[int, int]] = set()
    status, until = None, time.monotonic() + limit_s
    try:
        while (status := process.poll()) is None and time.monotonic() < until:
            # Processes that left its session can't be found any more once it has ended.
            started |= set(descendants(process.pid))
            time.sleep(0.2)
        if status is None:
            started |= set(descendants(process.pid))
            process.terminate()
            _wait(process, GRACE_S)
    finally:
        started |= set(descendants(process.pid))
        _kill(process, started)
    return status


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"{process.pid} goes on after SIGTERM: it is killed", flush=True)


def _kill(process: subprocess.Popen[bytes], started: set[tuple[int, int]]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
    for pid, start in started:
        # It may end by itself meanwhile.
        with suppress(ProcessLookupError):
            if start_of(pid) == start:
                os.kill(pid, signal.SIGKILL)


def read_record(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Returns empty results if the part did not write any."""
    if not path.exists():
        return {}, []
    record = json.loads(path.read_text())
    return {name: value for name, value in record.items() if name != "rows"}, record["rows"]


def is_right(row: Row) -> bool:
    return "error" not in row and not row.get("wrong") and bool(row.get("is_equal", True))


def unfinished(path: Path) -> list[str]:
    """Returns the names of the parts that this record asked for and that did not end well."""
    record = json.loads(path.read_text())
    well = {
        each["part"]
        for each in record["parts"]
        if each["how"] == "ended" and all(is_right(row) and is_measured(row) for row in each["rows"])
    }
    asked = record.get("asked") or [each["part"] for each in record["parts"]]
    return [name for name in asked if name not in well]


def longer_than(parts: Sequence[Part], minutes: float) -> str:
    """Returns a warning if the parts' limits exceed the time, otherwise an empty string."""
    seconds = sum(part.seconds for part in parts)
    if seconds <= 60 * minutes:
        return ""
    return (
        f"the limits of the parts add up to {seconds / 60:.1f} minutes, and there are {minutes:g}: parts usually take "
        "less, but the last ones may be skipped"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    args = parser.parse_args(arguments)
    names = args.parts
    if args.again:
        if args.again.resolve() == (args.out / "first.json").resolve():
            parser.error(f"--out {args.out}: would overwrite {args.again}")
        names = [name for name in unfinished(args.again) if name in names]
    parts = [replace(part, seconds=args.slack * part.seconds) for part in PARTS if part.name in names]
    options = ["--tiny"] if args.tiny else []
    if args.prepared:
        os.environ["ALIGNEDSERVE_PREPARED"] = str(args.prepared.absolute())
    if args.commit:
        os.environ["ALIGNEDSERVE_COMMIT"] = args.commit
    if args.tiny and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    first = First(args.out, options, args.minutes)
    # SIGTERM must not leave a part running.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if said := longer_than(parts, args.minutes):
        print(said, flush=True)
    first.run(parts)
    print("\n" + first.table())
    sys.exit(any(each.is_wrong for each in first.ended))


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"part {name!r}: must be one of {', '.join(NAMES)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.first",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", type=_names, default=list(NAMES), help=", ".join(NAMES))
    parser.add_argument("--again", type=Path, metavar="FIRST.json", help="only what did not end well there")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together")
    parser.add_argument(
        "--slack", type=float, default=1.0, help="times the limit of each part, for a slow machine"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prepared", type=Path, help="what `benchmarks.gpu.prepare` made")
    parser.add_argument("--commit", help="commit of a tree that is not a git checkout")
    parser.add_argument("--tiny", action="store_true", help="tiny models, also on a CPU")
    return parser


if __name__ == "__main__":
    main()
