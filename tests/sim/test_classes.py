"""Real time beside best effort on a small island: which requests wait for which, and the cost."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import Prefill, Request
from alignedserve.router.events import Event, Send
from alignedserve.router.router import Router
from alignedserve.sim.island import SimIsland
from alignedserve.sim.lifetime import Lifetimes
from alignedserve.sim.model import make_request
from alignedserve.types import Epoch
from tests.sim.islands import COST, limits, play, requests, small_island

NUM_BE = 60
# all of it comes at once
BATCH = [replace(each, tier="be") for each in requests(NUM_BE, every_s=0.0, prompt_len=200, output_len=80)]
CHATS = [
    make_request(1000 + number, 60, 20, 0.5 + 0.3 * number, max_tokens=50, ttft_s=0.3, tbt_s=0.1)
    for number in range(12)
]


def lifetimes_of(island: SimIsland, asked: list[Request], limit_s: float = 500.0) -> Lifetimes:
    lifetimes = Lifetimes()
    island.router.observers.append(lifetimes)
    play(island, asked, limit_s=limit_s)
    return lifetimes


def slowest_first_token_s(island: SimIsland) -> float:
    return max(
        stream.times_s[0] - stream.request.arrival_s
        for stream in island.streams
        if stream.request.tier == "rt"
    )


def test_a_first_token_waits_for_no_more_best_effort_than_instances_have_ahead() -> None:
    """The pool is full, and hundreds of prompts wait. A window is two iterations, and one is being computed."""
    found = {}
    for policy in ("aligned", "fcfs"):
        island = small_island(policy, pool_blocks=120)
        lifetimes_of(island, BATCH + CHATS)
        found[policy] = slowest_first_token_s(island)
    alone = small_island(pool_blocks=120)
    lifetimes_of(alone, CHATS)
    iteration_s = COST.iteration([(100, 128)], [])
    assert found["aligned"] <= slowest_first_token_s(alone) + 3 * iteration_s
    assert found["fcfs"] > 10 * found["aligned"]


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("link", ["host", "gloo"])
def test_nothing_is_computed_twice_however_often_somebody_has_to_leave(link: str) -> None:
    """Nobody foresees a length; each prompt goes to prefill once, and whole."""
    island = small_island(link=link, decode=limits(num_blocks=34), pool_blocks=100)
    prefills: list[tuple[int, int]] = []

    def watch(now: float, event: Event, sends: list[Send]) -> None:
        prefills.extend(
            (work.request.key, work.num_cached)
            for send in sends
            if isinstance(send.message, Prefill)
            for work in send.message.works
        )

    island.router.observers.append(watch)
    batch = [
        replace(each, tier="be") for each in requests(3 * NUM_BE, every_s=0.0, prompt_len=60, output_len=240)
    ]
    lifetimes = lifetimes_of(island, batch + CHATS, limit_s=2000.0)
    assert lifetimes.count("evicted") > 100
    assert sorted(prefills) == sorted((stream.request.key, 0) for stream in island.streams)
    assert island.router.core and island.router.core.state.counters.num_recomputed == 0


@pytest.mark.slow
def test_what_a_router_with_classes_did_replays() -> None:
    island = small_island(pool_blocks=120, decode=limits(num_blocks=40), scheduling={"be_share": 0.2})
    steps: list[tuple[float, Event, bytes]] = []

    def record(now: float, event: Event, sends: list[Send]) -> None:
        steps.append((now, event, msgspec.msgpack.encode(sends)))

    island.router.observers.append(record)
    lifetimes_of(island, BATCH + CHATS)
    encoded = [msgspec.msgpack.encode((now, event)) for now, event, _ in steps]
    decoder: Any = msgspec.msgpack.Decoder(tuple[float, Event])
    again = Router(island.config.router, Epoch(1), island.config.scheduling)
    for each, (_, _, sent) in zip(encoded, steps, strict=True):
        now, event = decoder.decode(each)
        assert msgspec.msgpack.encode(again.on(event, now)) == sent
