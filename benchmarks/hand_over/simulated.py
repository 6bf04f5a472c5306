"""Compares the direct hand-over with the way through the pool, in simulation: OPT-13B on A100s, link `nccl` (NVLink).

    python -m benchmarks.hand_over.simulated [--seconds 200] [--out DIR]

For each case it measures the time from the first to the second token of a real-time request, the times of the first and
of all tokens, the throughput, and the copies from and to the pool. The last cases have more real time than can be
decoded, so that batches of similar lengths wait in the pool: with a kernel that splits KV evenly, and with one in which
all sequences wait for the longest. All else is the same, including the arrivals. Writes hand_over.md and
hand_over.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.gateway import Stream
from alignedserve.sim.island import SimIsland
from alignedserve.sim.scenario import Scenario
from alignedserve.sim.trace import Arrival, LognormalLengths, poisson_arrivals
from alignedserve.timing.cost import Attention
from alignedserve.timing.cost_presets import load_cost_model
from benchmarks.harness import FOLDER, parser_of, say, table, write_page

COST = "opt-13b/a100-80gb"
MAX_MODEL_LEN = 4096
POOL_BYTES = 800e9
# Seconds until real time begins, when the instances are full of best effort.
FILL_S = 60.0
# Best-effort requests per decode instance: at the beginning, and per second after that, which is more than can be done.
BE_AT_FIRST, BE_PER_S = 200, 7.0

CHATS = LognormalLengths(200, 48, spread=1.6, max_prompt=1024, max_output=256)
DOCUMENTS = LognormalLengths(2000, 48, spread=1.3, max_prompt=3500, max_output=256)
# Widely varying lengths.
STORIES = LognormalLengths(500, 300, spread=2.5, max_prompt=3000, max_output=1000)
BEST_EFFORT = LognormalLengths(500, 250, spread=1.6, max_prompt=2048, max_output=1024)


WAYS = {"through the pool": "benchmarks.hand_over.through_pool:AlignedThroughPool", "directly": "aligned"}


@dataclass(frozen=True)
class Case:
    name: str
    lengths: LognormalLengths
    # Real-time requests per second.
    rate: float
    num_prefill: int = 1
    num_decode: int = 1
    is_beside_be: bool = False
    attention: Attention = "balanced"

    def workload(self, seconds: float) -> list[Arrival]:
        lengths = self.lengths.sample(int(self.rate * seconds), seed=1)
        real_time = [
            replace(each, time_s=each.time_s + FILL_S)
            for each in poisson_arrivals(lengths, self.rate, seed=3)
        ]
        return sorted([*real_time, *self._best_effort(FILL_S + seconds)], key=lambda each: each.time_s)

    def _best_effort(self, end_s: float) -> Iterator[Arrival]:
        if self.is_beside_be:
            at_first, rate = BE_AT_FIRST * self.num_decode, BE_PER_S * self.num_decode
            times_s = [0.0] * at_first + [index / rate for index in range(int(rate * end_s))]
            for time_s, lengths in zip(times_s, BEST_EFFORT.sample(len(times_s), seed=2), strict=True):
                yield Arrival(time_s, lengths, "be")


CASES = (
    Case("chats alone, 1 + 1, 2 a second", CHATS, 2.0),
    Case("chats alone, 2 + 2, 8 a second", CHATS, 8.0, 2, 2),
    Case("documents alone, 1 + 1, 1 a second", DOCUMENTS, 1.0),
    Case("chats beside best effort, 1 + 1", CHATS, 0.5, is_beside_be=True),
    Case("chats beside best effort, 2 + 2", CHATS, 1.0, 2, 2, is_beside_be=True),
    Case("documents beside best effort, 2 + 2", DOCUMENTS, 0.5, 2, 2, is_beside_be=True),
    Case("more than can be decoded, 4 + 1", STORIES, 8.0, 4),
    Case("more than can be decoded, 4 + 1, padded", STORIES, 8.0, 4, attention="padded"),
)


@dataclass(frozen=True)
class Row:
    case: str
    way: str
    num_requests: int
    num_handed_over: int
    ttft_p50_s: float
    # From the first token to the second.
    second_p50_s: float
    second_p99_s: float
    # Between any two tokens of real time.
    gap_p50_s: float
    gap_p99_s: float
    # Output tokens of both classes.
    tokens_per_s: float
    loaded_gb: float
    saved_gb: float
    pulled_gb: float


def measure(case: Case, way: str, seconds: float) -> Row:
    scenario = Scenario(
        load_cost_model(COST).with_attention(case.attention),
        RouterConfig(link="nccl"),
        num_prefill=case.num_prefill,
        num_decode=case.num_decode,
        max_model_len=MAX_MODEL_LEN,
        pool_bytes=POOL_BYTES,
        scheduling=SchedulingConfig(WAYS[way]),
        is_checked=False,
    )
    island = scenario.island()
    island.submit(scenario.requests(case.workload(seconds)))
    island.start()
    end_s = FILL_S + seconds
    island.run(end_s)
    return row(case, way, island, end_s)


def row(case: Case, way: str, island: SimIsland, end_s: float) -> Row:
    real_time = [each for each in island.streams if each.request.tier == "rt" and len(each.times_s) > 1]
    gaps_s = [_gaps_s(each) for each in real_time]
    all_gaps_s = [gap_s for each in gaps_s for gap_s in each]
    num_tokens = sum(time_s >= FILL_S for each in island.streams for time_s in each.times_s)
    return Row(
        case.name,
        way,
        len(real_time),
        _num_handed_over(island),
        quantile([each.times_s[0] - each.request.arrival_s for each in real_time], 0.5),
        quantile([each[0] for each in gaps_s], 0.5),
        quantile([each[0] for each in gaps_s], 0.99),
        quantile(all_gaps_s, 0.5),
        quantile(all_gaps_s, 0.99),
        num_tokens / (end_s - FILL_S),
        *(_num_bytes(island, what) / 1e9 for what in ("load", "save", "pull")),
    )


def _gaps_s(stream: Stream) -> list[float]:
    return [later - earlier for earlier, later in zip(stream.times_s, stream.times_s[1:], strict=False)]


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def _num_handed_over(island: SimIsland) -> int:
    core = island.router.core
    return (
        sum(core.state.counters.of(each.instance_id).num_handed_over for each in island.prefills)
        if core
        else 0
    )


def _num_bytes(island: SimIsland, what: str) -> int:
    core = island.router.core
    stats = [core.state.counters.of(each.instance_id) for each in island.instances] if core else []
    return sum(moved.num_bytes for each in stats for moved in each.moved if moved.what == what)


HEAD = (
    *("case", "way", "requests", "handed over", "TTFT p50", "second token p50", "p99", "gaps p50", "p99"),
    *("tokens/s", "loaded", "saved", "pulled"),
)


def cells(each: Row) -> tuple[object, ...]:
    times_s = each.ttft_p50_s, each.second_p50_s, each.second_p99_s, each.gap_p50_s, each.gap_p99_s
    return (
        *(each.case, each.way, each.num_requests, each.num_handed_over),
        *(f"{1000 * seconds:.1f}" for seconds in times_s),
        *(f"{amount:.0f}" for amount in (each.tokens_per_s, each.loaded_gb, each.saved_gb, each.pulled_gb)),
    )


def page(rows: Sequence[Row], seconds: float) -> str:
    return (
        "# Direct hand-over of real time\n\n"
        "```sh\n"
        f"python -m benchmarks.hand_over.simulated --seconds {seconds:g} --out benchmarks/results\n"
        "```\n\n"
        f"Each case simulates {seconds:g} s of OPT-13B on A100s, with its cost model, `aligned` and link `nccl`.\n\n"
        "| column | meaning |\n| --- | --- |\n"
        "| times | of real time, in milliseconds |\n"
        "| second token | from the first token to the second |\n"
        "| requests | of real time, if they got a second token before the end |\n"
        "| tokens/s | of both classes |\n"
        "| loaded, saved, pulled | GB from the pool, to the pool, and from instance to instance |\n\n"
        f"{table(HEAD, map(cells, rows), 2)}\n"
    )


def main() -> None:
    parser = parser_of(__doc__, out=FOLDER)
    parser.add_argument("--seconds", type=float, default=200.0, help="seconds of real time per case")
    args = parser.parse_args()
    rows: list[Row] = []
    for case in CASES:
        for way in WAYS:
            rows.append(measure(case, way, args.seconds))
            say(" | ".join(map(str, cells(rows[-1]))))
    write_page(args.out and args.out / "hand_over", page(rows, args.seconds), rows)


if __name__ == "__main__":
    main()
