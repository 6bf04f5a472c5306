"""Runs the benchmark, shows its progress, and exits with 1 if anything was wrong."""

from __future__ import annotations

import random
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import soak
from benchmarks.harness import FOLDER, exit_on_sigterm, facts, parser_of, progress, say
from benchmarks.soak.faults import GRACE_S
from benchmarks.soak.questions import answers_to, make_questions
from benchmarks.soak.report import growth_objections, write
from benchmarks.soak.run import Outcome, Soak
from benchmarks.soak.served import Setup, serving

NUM_QUESTIONS = 48


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    exit_on_sigterm()
    seed = random.SystemRandom().randrange(10**9) if args.seed is None else args.seed
    counts = args.prefill, args.decode, args.colocated, args.chats
    setup = Setup(60 * args.minutes, seed, *counts, grace_s=args.grace)
    outcome = carry_out(setup, args.out)
    memory = outcome.memory_before, outcome.memory_after
    wrong = [*outcome.wrong, *growth_objections(*memory)]
    say(write(args.out, describe(setup), outcome.faults, outcome.tally, memory, wrong))
    say(f"{len(wrong)} wrong, seed {seed}: {args.out / 'soak.md'}")
    sys.exit(1 if wrong else 0)


def carry_out(setup: Setup, out: Path) -> Outcome:
    """Runs it. The server's log is kept in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    with progress(round(setup.seconds), "s") as bar:
        bar.set_description("what the engine alone answers")
        questions = make_questions(setup.seed, NUM_QUESTIONS)
        asked = list(zip(questions, answers_to(questions), strict=True))
        bar.set_description("starting a server")
        with serving(setup) as served:
            run = Soak(setup, served, asked, bar)
            try:
                run.run()
            finally:
                shutil.copy(served.log, out / "serve.log")
    return run.outcome


def describe(setup: Setup) -> dict[str, Any]:
    return facts() | {"seed": setup.seed, "seconds": setup.seconds, "instances": setup.instance_ids}


def _parser() -> ArgumentParser:
    parser = parser_of(soak.__doc__, out=FOLDER | {"default": Path("soak")})
    parser.add_argument(
        "--minutes", type=float, default=3.0, help="minutes with faults, without start and end"
    )
    parser.add_argument("--seed", type=int, help="seed [default: random]")
    parser.add_argument("--prefill", type=int, default=1, help="prefill instances")
    parser.add_argument("--decode", type=int, default=2, help="decode instances")
    parser.add_argument("--colocated", type=int, default=0, help="colocated instances, instead of those")
    parser.add_argument("--chats", type=int, default=6, help="chat clients per class, beside batch jobs")
    parser.add_argument(
        "--grace", type=float, default=GRACE_S, help="seconds after a recovery in which errors are excused"
    )
    return parser


if __name__ == "__main__":
    main()
