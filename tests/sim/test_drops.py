"""Requests that leave an instance without their KV, in virtual time: it is computed again, and no token is lost."""

from __future__ import annotations

from typing import Any

import pytest

from alignedserve.protocol.messages import Reserve
from alignedserve.router.events import Event, Send
from alignedserve.sim.island import Island
from alignedserve.sim.lifetime import Lifetimes
from alignedserve.types import InstanceId
from tests.scheduling.dropping import NAME
from tests.sim.islands import limits, requests, small_island

SHORT = limits(num_blocks=34)
colocated_or_apart = pytest.mark.parametrize("apart", [False, True], ids=["colocated", "apart"])


def island_of(apart: bool, **options: Any) -> tuple[Island, Lifetimes]:
    roles = {"num_prefill": 1, "num_decode": 2} if apart else {"num_colocated": 2}
    island = small_island(NAME, **({"pool_blocks": 400, "decode": SHORT} | roles | options))
    island.router.observers.append(lifetimes := Lifetimes())
    return island, lifetimes


def finish(island: Island, num_requests: int) -> None:
    assert island.run_until_done(num_requests, 2000.0), f"{island.num_open} are open at {island.now} s"
    island.settle()
    island.check_idle()
    assert all(stream.is_complete for stream in island.streams)


@colocated_or_apart
def test_who_is_dropped_is_computed_again_and_gets_its_tokens(apart: bool) -> None:
    island, lifetimes = island_of(apart)
    asked = requests(40, every_s=0.0, prompt_len=60, output_len=240)
    island.submit(asked)
    island.start()
    finish(island, len(asked))
    assert lifetimes.count("dropped") > 10 and not lifetimes.count("evicted")
    again = {key for key, events in lifetimes.events.items() if "dropped" in {each.name for each in events}}
    for stream in island.streams:
        num_needed = len(stream.request.prompt) + len(stream.tokens) - 1
        is_again = stream.request.key in again
        assert (island.world.computed[stream.request.key] > num_needed) is is_again


def test_colocated_instances_that_drop_ask_nothing_of_the_pool() -> None:
    island, _ = island_of(apart=False)
    reserved = []

    def observe(now: float, event: Event, sends: list[Send]) -> None:
        reserved.extend(send for send in sends if isinstance(send.message, Reserve))

    island.router.observers.append(observe)
    island.submit(asked := requests(40, every_s=0.0, prompt_len=60, output_len=240))
    island.start()
    finish(island, len(asked))
    assert not reserved


@colocated_or_apart
@pytest.mark.parametrize("victim", ["instance", "kvpool-0", "router"])
def test_a_death_among_drops_costs_no_token(apart: bool, victim: str) -> None:
    island, lifetimes = island_of(apart)
    asked = requests(24, every_s=0.02, prompt_len=60, output_len=120)
    island.submit(asked)
    island.start()
    assert island.world.clock.run_while(lambda: lifetimes.count("dropped") < 3, 100.0)
    name = victim if victim != "instance" else ("decode-0" if apart else "colocated-0")
    process: Any = island.router if victim == "router" else island.world.processes[InstanceId(name)]
    process.kill()
    island.run(0.5)
    process.start()
    finish(island, len(asked))
