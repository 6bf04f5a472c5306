"""Checks that `alignedserve serve` works on one GPU, with each link and as one colocated instance.

Each setup has clients of both classes and batch jobs at once. Their answers are compared with answers that the engine
computed in float32 on a CPU. Its processes are killed one after the other in mid-stream, and nothing may be left behind
at the end. The setups run at the same time, because this checks correctness, not speed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.gpu.record import Record, Row, describe_machine
from benchmarks.soak.plan import Episode, Strike
from benchmarks.soak.questions import Answer, Question, answers_to, make_questions
from benchmarks.soak.run import Outcome, Soak
from benchmarks.soak.served import Setup, serving

NUM_QUESTIONS = 48
ANSWERS = "answers.json"
# Simultaneous streams of each class.
NUM_CHATS, NUM_TINY_CHATS = 6, 2
SEED = 58
# Before each kill, with all processes running.
PAUSE_S, TINY_PAUSE_S = 3.0, 1.0
MOST_S = 600.0
OPTIONS = ("--max-num-seqs", "64", "--kv-cache-memory-bytes", str(1 << 30))
VICTIMS = {
    "ipc": ("decode", "prefill", "kvpool", "router"),
    "gloo": ("decode", "prefill", "kvpool", "router"),
    "host": ("prefill", "decode"),
    "colocated": ("colocated", "kvpool"),
}
TINY_VICTIMS = VICTIMS | {"gloo": ("decode", "router")}


def setup_of(case: str, device: str, num_chats: int = NUM_CHATS) -> Setup:
    options = (*OPTIONS, "--device", device)
    if case == "colocated":
        return Setup(MOST_S, SEED, num_colocated=1, num_chats=num_chats, extra=options)
    return Setup(MOST_S, SEED, 1, 1, num_chats=num_chats, extra=(*options, "--link", case))


def asked_of(prepared: Path | None) -> list[tuple[Question, Answer]]:
    if prepared is None:
        questions = make_questions(SEED, NUM_QUESTIONS)
        return list(zip(questions, answers_to(questions), strict=True))
    found = json.loads((prepared / ANSWERS).read_text())
    return [(Question(**each["question"]), Answer(**each["answer"])) for each in found]


def write_answers(prepared: Path) -> None:
    found = [{"question": asdict(question), "answer": asdict(answer)} for question, answer in asked_of(None)]
    (prepared / ANSWERS).write_text(json.dumps(found))


def silent() -> tqdm[Any]:
    """The setups run at the same time, so their results are only shown in the table."""
    return tqdm(disable=True)


@dataclass
class Case:
    name: str
    device: str
    is_tiny: bool = False
    soak: Soak | None = None
    log: Path | None = None
    ended: Row | None = None

    def run(self, asked: Sequence[tuple[Question, Answer]], out: Path) -> Case:
        setup = setup_of(self.name, self.device, NUM_TINY_CHATS if self.is_tiny else NUM_CHATS)
        victims = (TINY_VICTIMS if self.is_tiny else VICTIMS)[self.name]
        pause_s = TINY_PAUSE_S if self.is_tiny else PAUSE_S
        plan = [Episode("alone", pause_s, (Strike(0.0, role, 0),)) for role in victims]
        kept = out / f"{self.name}.log"
        try:
            with serving(setup) as served:
                self.log = served.log
                self.soak = Soak(setup, served, asked, silent(), plan)
                try:
                    self.soak.run()
                finally:
                    shutil.copy(served.log, kept)
            self.ended = row_of(self.soak.outcome, kept.read_text(errors="replace"))
        except Exception:
            self.ended = {"error": traceback.format_exc()}
        return self

    def row(self) -> Row:
        """Returns the row even if it has not ended."""
        if self.ended is not None:
            return self.ended
        if self.soak is None or self.log is None:
            return {"wrong": ["it has not got ready"], "summary": "it has not got ready"}
        said = self.log.read_text(errors="replace")
        self.soak.outcome.wrong.append(f"it is not over; its last words: {said[-600:]}")
        return row_of(self.soak.outcome, said)


def row_of(outcome: Outcome, said: str) -> Row:
    tally, ready = outcome.tally, re.search(r"ready after ([\d.]+)", said)
    killed = {fault.episode.strikes[0].role: fault.took_s for fault in outcome.faults}
    recovered = ", ".join(f"{role} {took:.1f}" for role, took in killed.items() if took is not None)
    counts = {name: value for name, value in vars(tally).items() if isinstance(value, int)}
    return {
        "ready_s": float(ready[1]) if ready else None,
        "killed": killed,
        "wrong": outcome.wrong,
        **counts,
        "summary": f"ready {ready[1] if ready else '?'} s, {tally.num_streams} streams, {tally.num_lines} lines; whole "
        f"again after (s): {recovered}; {len(outcome.wrong)} wrong"
        + "".join(f"\n      {what[:400]}" for what in outcome.wrong[:6]),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    is_cuda = torch.cuda.is_available() and not args.tiny
    device = "cuda" if is_cuda else "cpu"
    machine: dict[str, Any] = describe_machine(torch.device(device), "benchmarks.gpu.serves")
    record = Record(args.out / "gpu.json", machine)
    asked = asked_of(args.prepared)
    names = args.cases.split(",") if args.cases else ["ipc" if is_cuda else "gloo", "host", "colocated"]
    cases = [Case(name, device, args.tiny) for name in names]

    def note() -> None:
        record.rows = [{"part": "serves", "case": case.name, **case.row()} for case in cases]
        record.write()
        print(record.table(), flush=True)

    def stop(number: int, frame: object) -> None:
        """Also kills the servers, because they may hang."""
        try:
            note()
        finally:
            os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    with ThreadPoolExecutor(len(cases)) as pool:
        for each in as_completed([pool.submit(case.run, asked, args.out) for case in cases]):
            case = each.result()
            if args.log and (args.out / f"{case.name}.log").exists():
                print((args.out / f"{case.name}.log").read_text(errors="replace")[-6000:])
    note()
    return int(any("error" in row or row["wrong"] for row in record.rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.serves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    prepared = os.environ.get("ALIGNEDSERVE_PREPARED")
    parser.add_argument(
        "--cases", help="ipc, host, gloo, colocated [default: those that the device supports]"
    )
    parser.add_argument("--prepared", type=Path, default=Path(prepared) if prepared else None)
    parser.add_argument("--minutes", type=float, help="time after which the caller stops it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--log", action="store_true", help="also print the servers' logs")
    parser.add_argument("--tiny", action="store_true", help="on a CPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
