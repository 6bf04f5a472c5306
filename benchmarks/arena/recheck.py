"""Plays the default policy again in recorded scenarios, and fails if it has become worse.

    python -m benchmarks.arena.recheck [--record FILE] [--count N] [--seed N] [--jobs N]

The seed draws the scenarios from the record, in which every policy has a score. The other policies' scores are those of
the record. A change seldom affects them, and playing all of them takes ten times as long. `gate.worse` says what counts
as worse.
"""

from __future__ import annotations

import json
import os
import random
import sys
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from alignedserve.scheduling.config import SchedulingConfig
from benchmarks.arena.gate import worse
from benchmarks.arena.played import Score, play
from benchmarks.arena.regimes import draw
from benchmarks.arena.regret import judge
from benchmarks.harness import parser_of

DEFAULT = SchedulingConfig().policy
RECORD = Path(__file__).parents[1] / "results" / "arena.jsonl"


def main() -> None:
    args = _args()
    record = read(args.record)
    numbers = sorted(random.Random(args.seed).sample(sorted(record), min(args.count, len(record))))
    found: list[str] = []
    with ProcessPoolExecutor(args.jobs) as pool:
        for number, score in zip(numbers, pool.map(_play, numbers), strict=True):
            regime, scores = draw(number), record[number]
            then = judge(regime, [*scores.values()])
            now = judge(regime, [*(scores | {DEFAULT: score}).values()])
            print(
                f"{number:5}  {100 * score.in_time:5.1f} % in time, {100 * now.verdicts[DEFAULT].regret:.1f} points "
                f"behind the best; recorded: {100 * scores[DEFAULT].in_time:.1f} %",
                flush=True,
            )
            found += worse(then, now, DEFAULT)
    for failure in found:
        print(failure)
    sys.exit(1 if found else 0)


def _args() -> Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--record", type=Path, default=RECORD, metavar="FILE")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


def read(path: Path) -> dict[int, dict[str, Score]]:
    """Returns the scores by scenario and policy, of scenarios in which the default has one. Later lines of the file
    take precedence."""
    found: dict[int, dict[str, Score]] = {}
    for line in path.read_text().splitlines():
        told = json.loads(line)
        if "score" in told:
            score = Score(**told["score"])
            found.setdefault(told["key"]["number"], {})[score.policy] = score
    return {number: scores for number, scores in found.items() if DEFAULT in scores}


def _play(number: int) -> Score:
    return play(draw(number, (), [DEFAULT]))[0]


if __name__ == "__main__":
    main()
