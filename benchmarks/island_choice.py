"""Compares two choices of islands in simulation: by load and cached prefix, and by the fewest open requests.

    python -m benchmarks.island_choice [--seconds 200] [--out DIR]

It simulates OPT-13B on A100s by its cost model, with prefix caches on prefill instances. A chat has six turns. Each
prompt contains everything before it, after one of four system prompts. Two gateways take turns. Each knows its own
requests, and the loads that routers report four times a second. All else is the same, including the arrivals. Writes
island_choice.md and island_choice.json.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from alignedserve.gateway.islands.choice import IslandLoad, best
from alignedserve.protocol.messages import InstanceLimits, Request
from alignedserve.router.config import RouterConfig
from alignedserve.router.server import LOAD_S
from alignedserve.router.status import LoadMeter
from alignedserve.scheduling.prefixes import block_hashes
from alignedserve.sim.clock import Clock
from alignedserve.sim.gateway import Stream
from alignedserve.sim.island import IslandConfig, SimIsland
from alignedserve.sim.model import make_request
from alignedserve.sim.report import Objectives
from alignedserve.timing.cost import CostModel
from alignedserve.timing.cost_presets import load_cost_model
from benchmarks.harness import FOLDER, facts, parser_of, publish, say, seconds_of, table

COST = "opt-13b/a100-80gb"
BLOCK_SIZE, MAX_MODEL_LEN = 16, 4096
NUM_GATEWAYS = 2
NUM_TURNS, THINK_S = 6, 8.0
NUM_SYSTEM_PROMPTS, SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 4, 400, 60, 150
SLO = Objectives(ttft_s=0.5, tpot_s=0.1)
# Seconds after the last chat's begin until nothing is open.
REST_S = 600.0


@dataclass(frozen=True)
class Case:
    name: str
    # (prefill instances, decode instances) per island.
    islands: tuple[tuple[int, int], ...]
    # New chats per second.
    rate: float


CASES = (
    Case("four islands alike", ((1, 1),) * 4, 8.0),
    Case("the same, less to do", ((1, 1),) * 4, 4.0),
    Case("one of twice the size, two others", ((2, 2), (1, 1), (1, 1)), 8.0),
)


@dataclass(frozen=True)
class Row:
    case: str
    choice: str
    # Share of all prompt tokens that were found in prefix caches.
    found: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    # Share of requests that met both objectives.
    in_time: float
    num_requests: int


class Seen:
    """An island as seen by one gateway."""

    is_up, is_given_up, is_leaving = True, False, False

    def __init__(self, island: SimIsland) -> None:
        self.island = island
        self.island_load = IslandLoad()
        self.num_open = 0


Choose = Callable[[Sequence[Seen], Request], Seen]


def fewest_open(islands: Sequence[Seen], request: Request) -> Seen:
    return min(islands, key=lambda each: each.num_open)


def by_outlook(islands: Sequence[Seen], request: Request) -> Seen:
    hashes = block_hashes(request)
    chosen = best(islands, request, hashes)
    chosen.island_load.sent(request, hashes)
    return chosen


CHOICES: dict[str, Choose] = {"fewest open": fewest_open, "by load and prefix": by_outlook}


@dataclass
class Chat:
    dice: random.Random
    prompt: list[int]
    num_left: int = NUM_TURNS


@dataclass
class Run:
    case: Case
    choose: Choose
    clock: Clock = field(default_factory=Clock)
    streams: list[Stream] = field(default_factory=list)
    _num_asked: int = 0

    def run(self, seconds: float) -> None:
        self.islands = [make_island(each, self.clock) for each in self.case.islands]
        self.gateways = [[Seen(island) for island in self.islands] for _ in range(NUM_GATEWAYS)]
        for island in self.islands:
            island.start()
            assert island.router.core
            self._tell(island, LoadMeter(island.router.core), seconds + REST_S)
            island.gateways[0].listeners.append(self._ended)
        self._chats: dict[int, tuple[Chat, Seen]] = {}
        dice = random.Random(1)
        begin_s = 1.0
        while begin_s < seconds:
            self.clock.at(
                begin_s, partial(self._ask, Chat(random.Random(dice.random()), system_prompt(dice)))
            )
            begin_s += dice.expovariate(self.case.rate)
        self.clock.run_until(seconds + REST_S)
        assert not self._chats, f"{len(self._chats)} are open"

    def _tell(self, island: SimIsland, meter: LoadMeter, until_s: float) -> None:
        load = meter.read(self.clock.now)
        for gateway in self.gateways:
            next(each for each in gateway if each.island is island).island_load.hear(load)
        if self.clock.now < until_s:
            self.clock.after(LOAD_S, partial(self._tell, island, meter, until_s))

    def _ask(self, chat: Chat) -> None:
        self._num_asked += 1
        chat.num_left -= 1
        chat.prompt += tokens(chat.dice, QUESTION_TOKENS)
        num_output = round(chat.dice.expovariate(1 / ANSWER_TOKENS)) + 1
        made = make_request(
            self._num_asked, 1, min(num_output, 600), self.clock.now, ttft_s=SLO.ttft_s, tbt_s=SLO.tpot_s
        )
        request = replace(made, prompt=list(chat.prompt))
        chosen = self.choose(self.gateways[self._num_asked % NUM_GATEWAYS], request)
        chosen.num_open += 1
        self._chats[request.key] = chat, chosen
        chosen.island.gateways[0].submit(request)

    def _ended(self, stream: Stream) -> None:
        chat, chosen = self._chats.pop(stream.request.key)
        assert stream.is_complete, stream.outcome
        chosen.num_open -= 1
        self.streams.append(stream)
        chat.prompt += stream.tokens
        if chat.num_left and len(chat.prompt) + QUESTION_TOKENS * 4 + 600 < MAX_MODEL_LEN:
            self.clock.after(chat.dice.expovariate(1 / THINK_S), partial(self._ask, chat))

    def row(self, choice: str) -> Row:
        counted = [
            island.router.core.state.counters.of(each.instance_id)
            for island in self.islands
            if island.router.core
            for each in island.prefills
        ]
        num_asked = sum(each.num_asked_tokens for each in counted)
        ttfts_s = sorted(stream.times_s[0] - stream.request.arrival_s for stream in self.streams)
        return Row(
            self.case.name,
            choice,
            sum(each.num_found_tokens for each in counted) / num_asked,
            1000 * ttfts_s[len(ttfts_s) // 2],
            1000 * ttfts_s[len(ttfts_s) * 99 // 100],
            sum(map(is_in_time, self.streams)) / len(self.streams),
            len(self.streams),
        )


def is_in_time(stream: Stream) -> bool:
    times_s = stream.times_s
    tpot_s = (times_s[-1] - times_s[0]) / max(1, len(times_s) - 1)
    return times_s[0] - stream.request.arrival_s <= SLO.ttft_s and tpot_s <= SLO.tpot_s


def tokens(dice: random.Random, mean: int) -> list[int]:
    count = min(4 * mean, round(dice.expovariate(1 / mean)) + 1)
    return [dice.randrange(1000, 50_000) for _ in range(count)]


def system_prompt(dice: random.Random) -> list[int]:
    return [dice.randrange(NUM_SYSTEM_PROMPTS)] * SYSTEM_TOKENS


def make_island(sizes: tuple[int, int], clock: Clock) -> SimIsland:
    cost: CostModel = load_cost_model(COST)
    limits = InstanceLimits(
        num_blocks=cost.num_kv_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=MAX_MODEL_LEN,
    )
    config = IslandConfig(
        cost=cost,
        prefill=limits,
        decode=limits,
        pool_blocks=int(200e9 / (BLOCK_SIZE * cost.pool_bytes_per_token)),
        num_prefill=sizes[0],
        num_decode=sizes[1],
        router=RouterConfig(link="host"),
        enable_prefix_caching=True,
    )
    return SimIsland(config, clock=clock)


def hash_ms(num_tokens: int = 100_000, num_rounds: int = 20) -> float:
    """Returns the median milliseconds in which a gateway hashes a prompt of `num_tokens` tokens."""
    request = replace(make_request(1, 1, 1, 0.0), prompt=list(range(num_tokens)))
    return 1000 * statistics.median(seconds_of(block_hashes, request) for _ in range(num_rounds))


def page(rows: Sequence[Row], seconds: float, hashing_ms: float) -> str:
    head = ("islands", "choice", "found in caches", "TTFT p50, ms", "p99", "in time", "requests")
    cells = [
        (
            *(row.case, row.choice, f"{row.found:.1%}", f"{row.ttft_p50_ms:.0f}", f"{row.ttft_p99_ms:.0f}"),
            *(f"{row.in_time:.1%}", f"{row.num_requests:,}"),
        )
        for row in rows
    ]
    lines = [
        "# Islands chosen by load and prefix, or by the fewest open requests",
        "",
        "```sh",
        f"python -m benchmarks.island_choice --seconds {seconds:g}",
        "```",
        "",
        f"Chats are simulated, with {COST} and {NUM_GATEWAYS} gateways. The objectives are {1000 * SLO.ttft_s:g} ms "
        "to the",
        f"first token and {1000 * SLO.tpot_s:g} ms for each further one. A gateway takes {hashing_ms:.1f} ms to hash "
        "a prompt of",
        "100,000 tokens.",
        "",
        table(head, cells),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = parser_of(__doc__, out=FOLDER)
    parser.add_argument("--seconds", type=float, default=200.0)
    args = parser.parse_args()
    rows = []
    for case in CASES:
        for name, choose in CHOICES.items():
            run = Run(case, choose)
            run.run(args.seconds)
            rows.append(run.row(name))
            say(str(rows[-1]))
    content = facts() | {"seconds": args.seconds, "cost": COST, "rows": rows}
    publish(args.out and args.out / "island_choice", page(rows, args.seconds, hash_ms()), content)


if __name__ == "__main__":
    main()
