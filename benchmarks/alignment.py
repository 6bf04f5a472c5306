"""Where aligned batches would pay beyond what one GPU showed: worked out from steps that an H200 took.

    python -m benchmarks.alignment [--out FILE] [--all-reduce-us 10]

Everything here is arithmetic on `results/gpu.json`; `--all-reduce-us` is assumed.

**One rank.** A step is a base, in which nothing is attended to, and attention. The balanced kernel takes as long as the
sum of lengths says, the plain one as `plain_cost` says (alignedserve/timing/cost.py). Its two constants are fitted to
measured groups of requests. FlashAttention (torch's, as it is called for batches of unequal lengths) was only timed by
itself, with the heads of Llama-3.1-8B: it too is one program per sequence and KV head, and is fitted to those times.

**Tensor-parallel ranks** run the same batch, each with its share of the heads: they wait for each other in all-reduces,
but none is later than another. The base and the sums are divided by the number of ranks. One program still reads the
longest sequence of a head as slowly as ever: it takes as many times more sequences to fill a rank (`num_filling`), and
the wait for the longest one stays while all else shrinks. Matrices do not divide as evenly as that, so these are the
most that aligned batches can gain.

**Data-parallel ranks** each run their own batch, and wait for the slowest at every layer of experts. The same requests
are given to them in four ways, `RANK_PLANS`.

**Memory.** As many requests as fit into the memory for KV run at once, up to `MOST_AT_ONCE`: batches of short requests
are large, those of long ones small.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignedserve.timing.cost import plain_cost
from benchmarks.gpu.alignment import aligned_groups, heavy_tailed, mixed_groups
from benchmarks.gpu.attention import MIXES
from benchmarks.harness import parser_of, table

RESULTS = Path(__file__).parent / "results"
NUM_LAYERS = {"llama-3.1-8b": 32, "llama-2-7b": 32}
ATTENTION_MODEL = "llama-3.1-8b"
LONGEST = 4087
NUM_GROUPS = 8
RANKS = (1, 2, 4, 8)
NUM_DATA_RANKS = 8
ALL_REDUCES_PER_LAYER = 2
KV_TOKENS = (16_384, 65_536, 262_144)
MOST_AT_ONCE = 256

Groups = list[list[int]]
Row = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """The duration of a step on one rank, as a function of the attended lengths."""

    base_s: float
    token_s: float
    # 0 for the balanced kernel.
    num_filling: float = 0.0

    def seconds(self, lengths: Sequence[int]) -> float:
        return self.base_s + self.token_s * plain_cost(lengths, self.num_filling)

    def of_rank(self, num_ranks: int, all_reduce_s: float) -> Step:
        """Returns the step of one of `num_ranks` tensor-parallel ranks. `all_reduce_s`: seconds of all all-reduces of a
        step."""
        waits_s = all_reduce_s if num_ranks > 1 else 0.0
        return Step(self.base_s / num_ranks + waits_s, self.token_s / num_ranks, self.num_filling * num_ranks)


@dataclass(frozen=True)
class Case:
    model: str
    kernel: str
    batch: int
    step: Step
    # The measured gain of the groups; None if only attention was measured.
    gain: float | None
    # Relative errors of the model: for steps, or for attention alone.
    errors: tuple[float, ...]

    @property
    def name(self) -> tuple[str, str, str]:
        return self.model, self.kernel, str(self.batch)


def gain(step: Step, groups: dict[str, Groups]) -> float:
    return sum(map(step.seconds, groups["mixed"])) / sum(map(step.seconds, groups["aligned"]))


def groups_of(lengths: Sequence[int]) -> dict[str, Groups]:
    return {"mixed": mixed_groups(lengths, NUM_GROUPS), "aligned": aligned_groups(lengths, NUM_GROUPS)}


def measured_groups(batch: int) -> dict[str, Groups]:
    """The groups of `benchmarks.gpu.alignment`. `gpu.json` has only their sums."""
    return groups_of(heavy_tailed(batch * NUM_GROUPS, LONGEST))


def longer_groups(batch: int) -> dict[str, Groups]:
    """Groups with an equally heavy tail, and eight times the lengths."""
    return groups_of([8 * length for length in heavy_tailed(batch * NUM_GROUPS, LONGEST)])


# --- a model of the measurements


def fitted(points: Sequence[tuple[Sequence[int], float, float]], is_plain: bool) -> tuple[float, float]:
    """Returns the `token_s` and `num_filling` that minimise the squared relative errors. Each point is lengths, the
    seconds of attention, and the seconds to which an error is relative."""

    def fit(num_filling: float) -> tuple[float, float]:
        weighed = [
            (plain_cost(lengths, num_filling) / of_s, took_s / of_s) for lengths, took_s, of_s in points
        ]
        token_s = sum(x * y for x, y in weighed) / sum(x * x for x, _ in weighed)
        return sum((y - token_s * x) ** 2 for x, y in weighed), token_s

    num_filling = min((each / 4 for each in range(4, 400)), key=fit) if is_plain else 0.0
    return fit(num_filling)[1], num_filling


def cases_of(rows: Sequence[Row]) -> list[Case]:
    cases = []
    for model in NUM_LAYERS:
        for kernel in ("balanced", "plain"):
            chosen = [
                row for row in rows if "gain" in row and (row["model"], row["kernel"]) == (model, kernel)
            ]
            cases += _measured_cases(sorted(chosen, key=lambda row: row["batch"]))
    bases = {case.batch: case.step.base_s for case in cases if case.name[:2] == (ATTENTION_MODEL, "plain")}
    return cases + _flash_cases([row for row in rows if row.get("kernel") == "torch varlen"], bases)


def _measured_cases(rows: Sequence[Row]) -> list[Case]:
    """Returns a case per row. Each has its own measured base. The constants are common to all batches of a model and
    kernel."""
    steps = {
        row["batch"]: [
            (group, seconds)
            for kind, groups in measured_groups(row["batch"]).items()
            for group, seconds in zip(groups, row["step_s"][kind], strict=True)
        ]
        for row in rows
    }
    points = [
        (group, seconds - row["base_s"], seconds) for row in rows for group, seconds in steps[row["batch"]]
    ]
    constants = fitted(points, rows[0]["kernel"] == "plain")
    cases = []
    for row in rows:
        step = Step(row["base_s"], *constants)
        errors = tuple(step.seconds(group) / seconds - 1 for group, seconds in steps[row["batch"]])
        cases.append(Case(row["model"], row["kernel"], row["batch"], step, row["gain"], errors))
    return cases


def _flash_cases(rows: Sequence[Row], bases: dict[int, float]) -> list[Case]:
    """Uses the mixes with at least 30 sequences. For smaller batches FlashAttention splits sequences, as the balanced
    kernel does."""
    layers = NUM_LAYERS[ATTENTION_MODEL]
    timed = [(MIXES[row["mix"]], layers * row["median_s"]) for row in rows if len(MIXES[row["mix"]]) >= 30]
    token_s, num_filling = fitted([(lengths, took_s, took_s) for lengths, took_s in timed], is_plain=True)
    alone = Step(0.0, token_s, num_filling)
    errors = tuple(alone.seconds(lengths) / took_s - 1 for lengths, took_s in timed)
    return [
        Case(ATTENTION_MODEL, "FlashAttention", batch, Step(base_s, token_s, num_filling), None, errors)
        for batch, base_s in bases.items()
        if batch >= 30
    ]


# --- data-parallel ranks: each plan returns the batch of each rank, for each step


def at_random(lengths: Sequence[int], num_ranks: int, batch: int) -> list[Groups]:
    shuffled = list(lengths)
    random.Random(2).shuffle(shuffled)
    return by_step(cut(shuffled, batch), num_ranks)


def like_at_once(lengths: Sequence[int], num_ranks: int, batch: int) -> list[Groups]:
    """Aligned in each rank, and all ranks have similar lengths in the same step."""
    return [evened(step, batch) for step in by_step(cut(sorted(lengths), batch), num_ranks)]


def rank_for_each_length(lengths: Sequence[int], num_ranks: int, batch: int) -> list[Groups]:
    """Aligned in each rank, and one rank always has the longest requests."""
    groups = cut(sorted(lengths), batch)
    num_steps = len(groups) // num_ranks
    return [groups[step::num_steps] for step in range(num_steps)]


def equal_sums(lengths: Sequence[int], num_ranks: int, batch: int) -> list[Groups]:
    """Steps with the same requests as at random."""
    return [evened(step, batch) for step in at_random(lengths, num_ranks, batch)]


def evened(ranks: Groups, batch: int) -> Groups:
    """Assigns each request, the longest first, to the rank with the smallest sum."""
    evened_ranks: Groups = [[] for _ in ranks]
    for length in sorted((each for rank in ranks for each in rank), reverse=True):
        min((rank for rank in evened_ranks if len(rank) < batch), key=sum).append(length)
    return evened_ranks


RANK_PLANS: dict[str, Callable[[Sequence[int], int, int], list[Groups]]] = {
    "at random": at_random,
    "aligned, all ranks alike at a time": like_at_once,
    "aligned, a rank for each length": rank_for_each_length,
    "equal sums, lengths mixed": equal_sums,
}


def cut(lengths: Sequence[int], size: int) -> Groups:
    return [list(lengths[first : first + size]) for first in range(0, len(lengths), size)]


def by_step(groups: Groups, num_ranks: int) -> list[Groups]:
    return [groups[first : first + num_ranks] for first in range(0, len(groups), num_ranks)]


def together_s(step: Step, plan: Sequence[Groups]) -> float:
    """Returns the duration of all steps. Each lasts as long as its slowest rank."""
    return sum(max(map(step.seconds, ranks)) for ranks in plan)


# --- memory


def filled(lengths: Sequence[int], num_kv_tokens: int) -> Groups:
    """Groups the requests in this order, each group with as many as fit at once."""
    groups: Groups = []
    room = 0
    for length in lengths:
        if length > room or len(groups[-1]) == MOST_AT_ONCE:
            groups.append([])
            room = num_kv_tokens
        groups[-1].append(length)
        room -= length
    return groups


def filled_both_ways(batch: int, num_kv_tokens: int) -> dict[str, Groups]:
    lengths = heavy_tailed(batch * NUM_GROUPS * 8, LONGEST)
    return {"mixed": filled(lengths, num_kv_tokens), "aligned": filled(sorted(lengths), num_kv_tokens)}


# --- the page


def page(cases: Sequence[Case], all_reduce_us: float) -> str:
    plain = [case for case in cases if case.step.num_filling]
    ranks = ("1 rank", *(f"{num} ranks" for num in RANKS[1:]))
    memories = tuple(f"{num >> 10}K tokens" for num in KV_TOKENS)
    parts = (
        "# Where aligned batches would pay",
        f"```sh\npython -m benchmarks.alignment --all-reduce-us {all_reduce_us:g}\n```",
        (__doc__ or "").split("\n\n", 2)[2].strip(),
        "In all tables: how many times as long the same requests take in mixed batches as in aligned ones, or at "
        "random as in another way. Above 1, the other way pays.",
        "## One rank: measured, and as modelled",
        table((*HEAD, "measured", "modelled", "error, median"), [_checked(case) for case in cases]),
        f"## Tensor-parallel ranks, {ALL_REDUCES_PER_LAYER} all-reduces of {all_reduce_us:g} µs a layer",
        "With the balanced kernel it is 1 for any number of ranks, since only sums matter. Lengths as measured (median "
        "256, to 4K), and eight times as long.",
        table(
            (*HEAD, "lengths", *ranks), [row for case in plain for row in _tensor_ranks(case, all_reduce_us)]
        ),
        f"## {NUM_DATA_RANKS} data-parallel ranks in step",
        table((*HEAD, *list(RANK_PLANS)[1:]), [_data_ranks(case) for case in cases]),
        "## As many at once as fit into the memory",
        f"By the memory for KV; at most {MOST_AT_ONCE} requests at once; lengths to 4K. The base is that of the "
        "largest batch that was measured.",
        table((*HEAD[:2], *memories), [_memory(case) for case in cases if case.batch == 128]),
    )
    return "\n\n".join(parts)


HEAD = ("model", "kernel", "batch")


def _checked(case: Case) -> tuple[str, ...]:
    modelled = gain(case.step, measured_groups(case.batch))
    measured = "" if case.gain is None else f"{case.gain:.3f}"
    return (*case.name, measured, f"{modelled:.3f}", f"{statistics.median(map(abs, case.errors)):.1%}")


def _tensor_ranks(case: Case, all_reduce_us: float) -> list[tuple[str, ...]]:
    waits_s = ALL_REDUCES_PER_LAYER * NUM_LAYERS[case.model] * all_reduce_us * 1e-6
    steps = [case.step.of_rank(num, waits_s) for num in RANKS]
    kinds = {"to 4K": measured_groups(case.batch), "to 32K": longer_groups(case.batch)}
    return [
        (*case.name, name, *(f"{gain(step, groups):.2f}" for step in steps)) for name, groups in kinds.items()
    ]


def _data_ranks(case: Case) -> tuple[str, ...]:
    lengths = heavy_tailed(case.batch * NUM_GROUPS * NUM_DATA_RANKS, LONGEST)
    plans = [plan(lengths, NUM_DATA_RANKS, case.batch) for plan in RANK_PLANS.values()]
    random_s, *others_s = (together_s(case.step, plan) for plan in plans)
    return (*case.name, *(f"{random_s / each_s:.2f}" for each_s in others_s))


def _memory(case: Case) -> tuple[str, ...]:
    return (
        *case.name[:2],
        *(f"{gain(case.step, filled_both_ways(case.batch, num)):.2f}" for num in KV_TOKENS),
    )


def main() -> None:
    parser = parser_of(__doc__, out={"help": "also write the page to this file"})
    parser.add_argument(
        "--all-reduce-us",
        type=float,
        default=10.0,
        help="microseconds of one all-reduce of a step's activations",
    )
    options = parser.parse_args()
    text = page(cases_of(json.loads((RESULTS / "gpu.json").read_text())["rows"]), options.all_reduce_us)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
