"""Instances that keep the inputs of layers of some requests in place of KV, in virtual time.

A block that holds inputs is never taken for KV, nor the other way round: see `SimEngine._check_digest`.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.engine.request import NewRequest
from alignedserve.instance.memory import BlockManager
from alignedserve.instance.requests import id_of
from alignedserve.kv.held import Held
from alignedserve.kv.layout import INPUTS, PLAIN
from alignedserve.sim.executor import SimEngine
from alignedserve.sim.island import SimIsland
from alignedserve.sim.lifetime import Lifetimes
from alignedserve.types import InstanceId, RequestKey
from tests.scheduling.keeping_inputs import NAME
from tests.sim.islands import finish, limits, requests, small_island

LIMITS = replace(limits(num_blocks=34), max_restored_blocks=34)
POLICIES = pytest.mark.parametrize("policy", [NAME, "apt", "apt-s"])


class Watched:
    """An island that counts those which began with inputs."""

    def __init__(self, policy: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.kept: set[RequestKey] = set()
        adopt = SimEngine.adopt

        def watching(engine: SimEngine, new: NewRequest) -> Any:
            request = adopt(engine, new)
            if request is not None and not request.layout.holds_kv:
                self.kept.add(RequestKey(int(new.request_id)))
            return request

        monkeypatch.setattr(SimEngine, "adopt", watching)
        self.lifetimes = Lifetimes()
        self.island: SimIsland = small_island(
            policy, pool_blocks=400, decode=LIMITS, num_prefill=0, num_decode=0, **options
        )
        self.island.router.observers.append(self.lifetimes)

    def run(self, num: int, **asked: Any) -> None:
        self.island.submit(requests(num, **asked))
        self.island.start()

    def finish(self, num: int) -> None:
        finish(self.island, num, limit_s=4000.0)


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
@POLICIES
@pytest.mark.parametrize("prefix", [False, True], ids=["", "prefix-caching"])
def test_all_get_their_tokens(policy: str, prefix: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(policy, monkeypatch, num_colocated=2, enable_prefix_caching=prefix)
    # All prompts begin alike. Memory that they share becomes short with longer answers.
    watched.run(40, every_s=0.0, prompt_len=60, output_len=360 if prefix else 240)
    watched.finish(40)
    assert len(watched.kept) > 3
    assert watched.lifetimes.count("dropped") > 3


@pytest.mark.slow
@pytest.mark.drawn(one_in=3)
@POLICIES
@pytest.mark.parametrize("victim", ["colocated-0", "kvpool-0", "router"])
def test_a_death_costs_no_token(policy: str, victim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(policy, monkeypatch, num_colocated=2)
    watched.run(30, every_s=0.0, prompt_len=60, output_len=240)
    island = watched.island
    assert island.world.clock.run_while(lambda: len(watched.kept) < 3, 400.0)
    process: Any = island.router if victim == "router" else island.world.processes[InstanceId(victim)]
    process.kill()
    island.run(0.5)
    process.start()
    watched.finish(30)


def test_half_the_memory_and_a_longer_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 160 tokens; restoring 160 tokens takes what the cost model says."""
    engine = small_island("apt", decode=LIMITS, num_prefill=0, num_decode=0, num_colocated=1)
    engine.start()
    executor: Any = engine.colocated[0].engine
    memory: BlockManager = executor.memory
    asked = requests(1)[0]
    seconds = {}
    for keeps_inputs, num_blocks in ((False, 10), (True, 5)):
        held = Held(layout=INPUTS if keeps_inputs else PLAIN)
        memory.grow(held, num_blocks)
        request = executor.adopt(
            NewRequest(
                id_of(asked.key),
                [1] * 160,
                asked.params,
                asked.seed,
                held=held,
            )
        )
        executor.join(request)
        first = executor.launch([(request, 160)])
        executor.finish(first)
        memory.grow(held, num_blocks + 1)
        decode = executor.launch([(request, 1)])
        seconds[keeps_inputs] = (first.seconds, decode.seconds)
        executor.finish(decode)
        executor.release(request)
        memory.free(held)
    cost = engine.world.cost
    assert seconds[True][0] == seconds[False][0]
    assert seconds[True][1] == pytest.approx(seconds[False][1] + cost.restoring(160))
