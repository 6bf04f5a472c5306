"""Simulates agents: each calls a tool after every turn, and its next prompt has all that was said before.

    python -m benchmarks.agents [--agents 20] [--turns 30] [--pool-blocks N] [--flood-rate R] [--kill] [--seed 1]
        [--colocated N]

All agents have the same instructions of 4,000 tokens. Every turn adds 380 tokens on average, and an answer of 150, so
the last prompt has 20,000 tokens. A tool takes one to ten seconds. The island has two prefill and two decode instances
with the measured times of Qwen3 30B-A3B on an H200. It is simulated without answers in the pool, with them, and with
answers that are promised to the next turns. With `--flood-rate`, other chats of one turn arrive at this rate per second
under another key. With `--kill` one instance after the other is killed, one every five seconds. With `--colocated`
there are that many colocated instances in place of the others.
"""

from __future__ import annotations

import itertools
import statistics
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random

from msgspec.structs import replace

from alignedserve.protocol.messages import InstanceLimits, Request
from alignedserve.sim.gateway import Stream
from alignedserve.sim.island import IslandConfig, SimIsland
from alignedserve.sim.model import VOCABULARY, make_request
from alignedserve.timing.cost_presets import load_cost_model
from alignedserve.types import RequestKey
from benchmarks.harness import parser_of

COST = load_cost_model("qwen3-30b-a3b/h200")
BLOCK_SIZE = 16
NUM_COMMON, NUM_NEW, NUM_OUTPUT = 4000, 380, 150
TOOL_S = (1.0, 10.0)
# The agents start within this time.
START_S = 10.0
KILL_EVERY_S = 5.0
# The prompts of other chats.
NUM_FLOOD = 6000
LIMIT_S = 100_000.0


@dataclass
class Agent:
    number: int
    dice: Random
    said: list[int]
    num_turns: int = 0


@dataclass
class Agents:
    """All agents of a run. Each says its next turn when the one before has ended and its tool has answered."""

    island: SimIsland
    num_turns: int
    keeps_answers: bool
    num_left: int = 0
    num_new: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    _keys: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _of: dict[RequestKey, Agent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.island.gateways[0].listeners.append(self._ended)

    def start(self, num_agents: int, seed: int) -> None:
        common = Random(f"instructions {seed}").choices(range(VOCABULARY), k=NUM_COMMON)
        self.num_new += NUM_COMMON
        self.num_left = num_agents * self.num_turns
        for number in range(num_agents):
            dice = Random(f"{seed} {number}")
            agent = Agent(number, dice, [*common])
            self.island.world.clock.at(dice.uniform(0.0, START_S), partial(self._say, agent))

    def _say(self, agent: Agent) -> None:
        num_new = agent.dice.randint(NUM_NEW // 2, NUM_NEW * 3 // 2)
        agent.said += [agent.dice.randrange(VOCABULARY) for _ in range(num_new)]
        self.num_new += num_new
        request = self._request(agent)
        self._of[request.key] = agent
        self.island.gateways[0].submit(request)

    def _request(self, agent: Agent) -> Request:
        num_output = agent.dice.randint(NUM_OUTPUT // 2, NUM_OUTPUT * 3 // 2)
        prompt, now = [*agent.said], self.island.world.clock.now
        request = make_request(next(self._keys), len(prompt), num_output, now, prompt=prompt)
        return replace(
            request,
            has_next_turn=self.keeps_answers,
            owner="agents",
            awaits="tool",
            brings_results=agent.num_turns > 0,
        )

    def flood(self, rate: float, seed: int) -> None:
        """Lets other chats arrive until the agents are done."""
        dice = Random(f"flood {seed}")

        def arrive() -> None:
            if not self.num_left:
                return
            key, now = next(self._keys), self.island.world.clock.now
            prompt = [dice.randrange(VOCABULARY) for _ in range(NUM_FLOOD)]
            request = make_request(key, NUM_FLOOD, NUM_OUTPUT, now, prompt=prompt)
            self.island.gateways[0].submit(
                replace(request, has_next_turn=self.keeps_answers, cache_salt="flood")
            )
            self.island.world.clock.after(dice.expovariate(rate), arrive)

        self.island.world.clock.after(dice.expovariate(rate), arrive)

    def _ended(self, stream: Stream) -> None:
        agent = self._of.get(stream.request.key)
        if agent is None:
            return
        self.num_left -= 1
        agent.said += stream.tokens
        agent.num_turns += 1
        if agent.num_turns > 1:
            self.ttfts_s.append(stream.times_s[0] - stream.request.arrival_s)
        if agent.num_turns < self.num_turns:
            self.island.world.clock.after(agent.dice.uniform(*TOOL_S), partial(self._say, agent))

    @property
    def num_computed(self) -> int:
        """Prompt tokens that were computed. An answer's last token is computed with the next prompt."""
        computed: Counter[RequestKey] = self.island.world.computed
        streams = self.island.gateways[0].streams
        return sum(computed[key] - (len(streams[key].tokens) - 1) for key in self._of)


def run(args: Namespace, keeps_answers: bool, promised_share: float) -> Agents:
    limits = InstanceLimits(COST.num_kv_tokens // BLOCK_SIZE, BLOCK_SIZE, 256, 8192, 32768)
    config = IslandConfig(
        COST,
        prefill=limits,
        decode=limits,
        num_prefill=2,
        num_decode=2,
        num_colocated=args.colocated,
        pool_blocks=args.pool_blocks,
        enable_prefix_caching=True,
        promised_share=promised_share,
    )
    island = SimIsland(config)
    agents = Agents(island, args.turns, keeps_answers)
    island.start()
    agents.start(args.agents, args.seed)
    if args.flood_rate:
        agents.flood(args.flood_rate, args.seed)
    if args.kill:
        _kill_one_after_the_other(island)
    if not island.world.clock.run_while(lambda: agents.num_left + island.num_open > 0, LIMIT_S):
        raise RuntimeError(f"{agents.num_left} turns are still open")
    island.settle()
    island.check_idle()
    return agents


def _kill_one_after_the_other(island: SimIsland) -> None:
    victims = [*island.prefills, *island.decodes, *island.colocated]

    def kill(number: int) -> None:
        victim = victims[number % len(victims)]
        victim.kill()
        island.world.clock.after(1.0, victim.start)
        if number < 4 * len(victims):
            island.world.clock.after(KILL_EVERY_S, lambda: kill(number + 1))

    island.world.clock.after(2 * KILL_EVERY_S, lambda: kill(0))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--agents", type=int, default=20)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--pool-blocks", type=int, default=40_000)
    parser.add_argument("--flood-rate", type=float, default=0.0, help="other chats per second")
    parser.add_argument("--promised-share", type=float, default=0.25)
    parser.add_argument("--colocated", type=int, default=0, help="colocated instances in place of the others")
    parser.add_argument("--kill", action="store_true", help="kill instances meanwhile")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for name, keeps_answers, promised_share in (
        ("answers are not kept", False, 0.0),
        ("answers are kept", True, 0.0),
        ("and promised", True, args.promised_share),
    ):
        agents = run(args, keeps_answers, promised_share)
        ttft_s = sorted(agents.ttfts_s)
        print(
            f"{name:20} prompt tokens computed: {agents.num_computed:9,} of {agents.num_new:9,} new ones "
            f"({agents.num_computed / agents.num_new:.3f}); TTFT from the second turn on: "
            f"p50 {1e3 * statistics.median(ttft_s):.1f} ms, p99 {1e3 * ttft_s[int(0.99 * len(ttft_s))]:.1f} ms; "
            f"promises: {agents.island.pool.core.use.promises}"
        )


if __name__ == "__main__":
    main()
