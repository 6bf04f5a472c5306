"""Measures real time beside best effort on one GPU, live: one instance of Llama-3.1-8B's shape, policy by policy.

Chats with prompts of 400 to 1,200 tokens and answers of 64 to 128 arrive at random. The lines of a batch job, which
have 300 to 800 tokens and answers of 150 to 350, use the rest of the capacity. The cases are those of
`benchmarks.rt_with_be`: best effort alone, real time alone, both. Targets relative to real time alone: TTFT p50 1.05
and p99 1.10, gaps p99 1.05. Best effort keeps 0.90 of the capacity that is left.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from alignedserve.bench.workload import Item
from benchmarks.gpu.record import Record, Row, describe_machine
from benchmarks.gpu.words import word, write_tokenizer
from benchmarks.rt_with_be.arithmetic import Case, worth
from benchmarks.rt_with_be.live import Live, tried
from benchmarks.rt_with_be.served import serving
from benchmarks.rt_with_be.traffic import DEMO, MODEL, Traffic, arrivals

PRESET = "llama-3.1-8b"
VOCAB_SIZE = 128256
CHAT_WORDS, CHAT_OUTPUT = (400, 1200), (64, 128)
LINE_WORDS, LINE_OUTPUT = (300, 800), (150, 350)
NUM_SLOTS = 256
LEAST_S = 30.0
POLICIES = ("aligned", "fcfs")
AIMS = {"ttft_p50": 1.05, "ttft_p99": 1.10, "gap_p99": 1.05, "be_by_tokens": 0.90}


def _text(dice: random.Random, words: tuple[int, int]) -> list[dict[str, str]]:
    said = " ".join(word(dice.randrange(VOCAB_SIZE)) for _ in range(dice.randint(*words)))
    return [{"role": "user", "content": said}]


def chats(rate: float, seconds: float, cv: float, seed: int) -> list[Item]:
    dice = random.Random(seed)
    times = list(arrivals(dice, rate, seconds, cv))
    return [Item(due, "rt", _text(dice, CHAT_WORDS), dice.randint(*CHAT_OUTPUT), 0) for due in times]


def lines(count: int) -> dict[str, dict[str, Any]]:
    dice = random.Random(0)
    return {f"line-{number}": _line(dice) for number in range(count)}


def _line(dice: random.Random) -> dict[str, Any]:
    said = {"model": MODEL, "messages": _text(dice, LINE_WORDS), "temperature": 0, "ignore_eos": True}
    return said | {"max_tokens": dice.randint(*LINE_OUTPUT)}


WORDS = Traffic(chats, lines)


def served_options(is_tiny: bool, directory: Path) -> list[str]:
    own = ["--length-predictor", "hash", "--shutdown-timeout", "1", "--no-enable-prefix-caching"]
    if is_tiny:
        return ["--device", "cpu", "--max-num-seqs", "64", "--batch-max-num-lines", "128", *own]
    tokenizer = write_tokenizer(directory / "words", VOCAB_SIZE)
    named = ["--load-format", "dummy", "--tokenizer", str(tokenizer), "--served-model-name", MODEL]
    limits = ["--max-model-len", "4096", "--max-num-seqs", str(NUM_SLOTS)]
    limits += ["--batch-max-num-lines", str(2 * NUM_SLOTS), "--pool-memory-bytes", str(4 << 30)]
    return [PRESET, *named, *limits, *own]


def measured(live: Live, policy: str) -> list[Row]:
    """Returns the rows of its three cases and their comparison."""
    begun_s, rows = time.monotonic(), []
    roles = ["--colocated-instances", "1"]
    try:
        with serving(policy, *roles, usual=live.usual) as server:
            ready_s = time.monotonic() - begun_s
            for row in tried({}, live.cases(server, None, cv=1.0)):
                rows.append({"policy": policy, "ready_s": ready_s, **row, "summary": said_of(row)})
    except Exception:
        rows.append({"policy": policy, "error": traceback.format_exc()})
    cases = {row["case"]: Case.of(row) for row in rows if "case" in row}
    if cases.keys() == {"rt", "be", "mix"}:
        ratios = asdict(worth(**cases))
        said = ", ".join(f"{name} {value:.2f}" for name, value in ratios.items())
        rows.append({"policy": policy, "case": "worth", **ratios, "aims": AIMS, "summary": said})
    return rows


def said_of(row: Row) -> str:
    if "error" in row:
        return ""
    return (
        f"{row['num_rt']} chats, TTFT {row['ttft_p50_s'] * 1e3:.0f} {row['ttft_p99_s'] * 1e3:.0f} ms, gaps "
        f"{row['gap_p50_s'] * 1e3:.1f} {row['gap_p99_s'] * 1e3:.1f} ms, RT {row['rt_tokens_per_s']:.0f} BE "
        f"{row['be_tokens_per_s']:.0f} tokens/s, busy {row['busy']:.2f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    # Leaving a server's context stops it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
    record = Record(args.out / "gpu.json", describe_machine(device, "benchmarks.gpu.beside"))
    deadline = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="words-", dir="/tmp") as directory:
        live = Live(
            args.rt_rate,
            args.window or (3.0 if args.tiny else 10.0),
            args.lines or (400 if args.tiny else 1500),
            traffic=DEMO if args.tiny else WORDS,
        )
        live = replace(
            live,
            usual=served_options(args.tiny, Path(directory)),
            num_slots=64 if args.tiny else NUM_SLOTS,
            may_join=True,
        )
        policies = args.policies.split(",") if args.policies else POLICIES[:1] if args.tiny else POLICIES
        for policy in policies:
            if time.monotonic() + LEAST_S > deadline:
                record.add(
                    {"part": "beside", "case": policy, "skipped": True, "summary": "skipped: no time is left"}
                )
                continue
            for row in measured(live, policy):
                case = f"{policy} {row.pop('case', '')}".strip()
                record.add({"part": "beside", **row, "case": case})
                print(record.table().rpartition("\n")[2], flush=True)
    return int(any("error" in row for row in record.rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.beside",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--policies", help=f"[default: {','.join(POLICIES)}; with --tiny the first]")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--rt-rate", type=float, default=6.0, help="chats a second")
    parser.add_argument(
        "--window", type=float, help="length of each case in seconds [default: 10; with --tiny 3]"
    )
    parser.add_argument("--lines", type=int, help="lines in the batch job [default: 1500; with --tiny 400]")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="the demo model, on a CPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
