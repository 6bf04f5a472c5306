"""Requests that leave an instance without their KV, in virtual time: it is computed again, and no token is lost."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import Reserve
from alignedserve.router.events import Event, Send
from alignedserve.sim.foresight import oracle
from alignedserve.sim.island import SimIsland
from alignedserve.sim.lifetime import Lifetimes
from alignedserve.sim.model import make_request
from alignedserve.types import InstanceId
from tests.scheduling.dropping import NAME
from tests.sim.islands import every_policy, finish, limits, requests, small_island

SHORT = limits(num_blocks=34)
colocated_or_apart = pytest.mark.parametrize("apart", [False, True], ids=["colocated", "apart"])


def island_of(apart: bool, policy: str = NAME, **options: Any) -> tuple[SimIsland, Lifetimes]:
    roles = {"num_prefill": 1, "num_decode": 2} if apart else {"num_colocated": 2}
    made: dict[str, Any] = {"pool_blocks": 400, "decode": SHORT} | roles | options
    island = small_island(policy, **made)
    island.router.observers.append(lifetimes := Lifetimes())
    return island, lifetimes


@colocated_or_apart
def test_who_is_dropped_is_computed_again_and_gets_its_tokens(apart: bool) -> None:
    island, lifetimes = island_of(apart)
    asked = requests(40, every_s=0.0, prompt_len=60, output_len=240)
    island.submit(asked)
    island.start()
    finish(island, len(asked), limit_s=2000.0)
    assert lifetimes.count("dropped") > 10 and not lifetimes.count("evicted")
    again = {key for key, events in lifetimes.events.items() if "dropped" in {each.name for each in events}}
    for stream in island.streams:
        num_needed = len(stream.request.prompt) + len(stream.tokens) - 1
        is_again = stream.request.key in again
        assert (island.world.computed[stream.request.key] > num_needed) is is_again


def test_colocated_instances_that_drop_ask_nothing_of_the_pool() -> None:
    island, _ = island_of(apart=False)
    reserved = list[Send]()

    def observe(now: float, event: Event, sends: list[Send]) -> None:
        reserved.extend(send for send in sends if isinstance(send.message, Reserve))

    island.router.observers.append(observe)
    island.submit(asked := requests(40, every_s=0.0, prompt_len=60, output_len=240))
    island.start()
    finish(island, len(asked), limit_s=2000.0)
    assert not reserved


@pytest.mark.drawn(one_in=2)
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
    finish(island, len(asked), limit_s=2000.0)


@colocated_or_apart
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["recompute", "defer"])
@every_policy
def test_every_policy_can_drop_or_defer(policy: str, mode: str, apart: bool) -> None:
    """Best effort that fills the instances, and then real time."""
    asked = [replace(each, tier="be") for each in requests(24, every_s=0.0, prompt_len=60, output_len=200)]
    asked += [
        make_request(100 + number, 60, 20, 0.5 + 0.2 * number, max_tokens=50, ttft_s=0.3, tbt_s=0.1)
        for number in range(10)
    ]
    island, lifetimes = island_of(apart, policy, scheduling={"preemption_mode": mode})
    island.submit(asked)
    island.start()
    finish(island, len(asked), limit_s=2000.0)
    if mode == "recompute":
        assert lifetimes.count("dropped") > 0 and not lifetimes.count("evicted")
    else:
        assert not lifetimes.count("dropped")


@pytest.mark.parametrize("policy", ["aligned", "alise", "bros", "accelgen"])
def test_nobody_leaves_for_others_that_are_deferred(policy: str) -> None:
    """Each of the first fills an instance, and could be gone before the next begins to be late."""
    asked = [make_request(key, 300, 100, 0.0, max_tokens=150) for key in (1, 2)]
    asked = [replace(each, tier="be") for each in asked]
    asked.append(make_request(3, 300, 5, 1.0, max_tokens=50, ttft_s=0.3, tbt_s=0.1))
    left = {}
    for mode in ("swap", "defer"):
        scheduling = {"preemption_mode": mode}
        island, lifetimes = island_of(False, policy, scheduling=scheduling, foresee=oracle(512))
        island.submit(asked)
        island.start()
        finish(island, len(asked), limit_s=2000.0)
        left[mode] = lifetimes.count("evicted")
    assert left["swap"] > 0 == left["defer"]
