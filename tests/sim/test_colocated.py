"""Colocated instances in virtual time: prompts and decodes in one iteration, preempted into the pool and back."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec.structs import replace

from alignedserve.protocol.messages import DecodeReport, Request
from alignedserve.router.events import Event, Received, Send
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import POLICIES, make_policy
from alignedserve.sim.island import SimIsland
from alignedserve.sim.model import make_request
from alignedserve.types import InstanceId
from tests.sim.islands import every_policy, finish, limits, play, requests, small_island

SHORT = limits(num_blocks=34)


def island_of(policy: str, num: int = 1, **options: Any) -> SimIsland:
    return small_island(policy, num_colocated=num, **({"pool_blocks": 120} | options))


def both_classes(asked: list[Request]) -> list[Request]:
    """Every third is real time."""
    return [
        replace(each, tier="be") if each.key % 3 else replace(each, ttft_s=0.5, tbt_s=0.1) for each in asked
    ]


def evictions(island: SimIsland) -> int:
    core = island.router.core
    assert core
    return sum(core.state.counters.of(each.instance_id).num_evictions for each in island.colocated)


@every_policy
def test_every_request_gets_its_tokens(policy: str) -> None:
    island = island_of(policy, num=2)
    play(island, both_classes(requests(60, every_s=0.01)))
    assert all(island.world.computed[stream.request.key] for stream in island.streams)


@every_policy
def test_who_is_preempted_comes_back_with_its_kv(policy: str) -> None:
    """Nothing is computed twice, however often somebody has to leave."""
    island = island_of(policy, decode=SHORT, pool_blocks=800)
    asked = both_classes(requests(40, every_s=0.0, prompt_len=60, output_len=240))
    play(island, asked)
    assert evictions(island) > 10
    for stream in island.streams:
        num_tokens = len(stream.request.prompt) + len(stream.tokens)
        assert island.world.computed[stream.request.key] == num_tokens - 1


@every_policy
@pytest.mark.parametrize("victim", ["colocated-0", "kvpool-0", "router"])
def test_a_death_in_mid_stream_costs_no_token(policy: str, victim: str) -> None:
    """Also that of the only instance there is."""
    island = island_of(policy, decode=SHORT)
    asked = both_classes(requests(24, every_s=0.02, output_len=80))
    island.submit(asked)
    island.start()
    island.run(0.8)
    process: Any = island.router if victim == "router" else island.world.processes[InstanceId(victim)]
    process.kill()
    island.run(0.5)
    process.start()
    finish(island, len(asked))


@every_policy
def test_prompts_that_begin_alike_are_computed_once(policy: str) -> None:
    island = island_of(policy, enable_prefix_caching=True, pool_blocks=256)
    document, asked = [7] * 320, []
    for key in range(1, 9):
        made = make_request(key, 340, num_output_tokens=10, arrival_s=0.0)
        asked.append(replace(made, prompt=[*document, *[key] * 20]))
    play(island, asked)
    own = sum(20 + len(stream.tokens) - 1 for stream in island.streams)
    assert sum(island.world.computed.values()) == 320 + own


def test_real_time_does_not_wait_for_best_effort() -> None:
    """A batch that fills the instance, and then some chats."""
    batch = [replace(each, tier="be") for each in requests(60, every_s=0.0, prompt_len=200, output_len=80)]
    chats = [
        make_request(1000 + number, 60, 20, 0.5 + 0.3 * number, max_tokens=50, ttft_s=0.3, tbt_s=0.1)
        for number in range(12)
    ]
    found = {}
    for policy in ("aligned", "fcfs"):
        island = island_of(policy)
        play(island, batch + chats)
        found[policy] = max(
            stream.times_s[0] - stream.request.arrival_s
            for stream in island.streams
            if stream.request.tier == "rt"
        )
    assert found["aligned"] < 0.3 < 10 * found["aligned"] < found["fcfs"]


def test_whoever_decodes_is_stalled_by_no_prompt() -> None:
    """`sarathi` keeps iterations within the objective; `fcfs` computes as many tokens as it may."""
    chats = [make_request(key, 40, 100, 0.0, tbt_s=0.05, max_tokens=200) for key in range(1, 5)]
    documents = [make_request(10 + key, 480, 5, 0.5 + 0.4 * key) for key in range(5)]
    longest = {}
    for policy in ("sarathi", "fcfs"):
        roomy = limits(num_blocks=256, max_num_batched_tokens=2048)
        island = island_of(policy, decode=roomy, pool_blocks=400)
        play(island, chats + documents)
        gaps = [
            late - early
            for stream in island.streams
            if stream.request.key < 10
            for early, late in zip(stream.times_s, stream.times_s[1:], strict=False)
        ]
        longest[policy] = max(gaps)
    assert longest["sarathi"] < 0.052 < longest["fcfs"]


@every_policy
def test_no_iteration_has_more_tokens_than_it_may(policy: str) -> None:
    island = island_of(policy, decode=limits(num_blocks=128, max_num_batched_tokens=64))
    most = 0

    def watch(now: float, event: Event, sends: list[Send]) -> None:
        nonlocal most
        if isinstance(event, Received) and isinstance(event.message, DecodeReport):
            most = max(most, event.message.num_computed)

    island.router.observers.append(watch)
    play(island, both_classes(requests(30, every_s=0.0)))
    assert 60 < most <= 64


@pytest.mark.slow
@hypothesis_settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([*POLICIES]), st.integers(1, 3))
def test_whatever_dies_and_is_aborted_nothing_is_lost(seed: int, policy: str, num: int) -> None:
    dice = random.Random(seed)
    island = island_of(policy, num, decode=SHORT, enable_prefix_caching=dice.random() < 0.5)
    asked = both_classes(requests(30, every_s=0.03, prompt_len=150, output_len=120))
    island.submit(asked)
    island.start()
    for key in dice.sample(range(1, 31), 6):
        island.world.clock.at(dice.uniform(0.0, 3.0), lambda key=key: island.gateways[0].abort(key))  # type: ignore[misc]
    victims: list[Any] = [island.router, island.pool, *island.colocated]
    for _ in range(6):
        island.run(dice.uniform(0.05, 0.6))
        island.check()
        victim = dice.choice(victims)
        victim.kill()
        island.run(dice.uniform(0.0, 0.4))
        victim.start()
    assert island.run_until_done(30, 1000.0)
    island.settle()
    island.check_idle()
    assert {stream.outcome for stream in island.streams} <= {"stop", "length", "abort"}


def shares_blocks(num_blocks: int, share_blocks: bool = True, **options: Any) -> SimIsland:
    """Real time whose prompts need many blocks, beside best effort that has them all."""
    scheduling = {"share_blocks": share_blocks, "evict_ahead": 1, "admit_ahead": 1}
    return island_of("bros", decode=limits(num_blocks=num_blocks), scheduling=scheduling, **options)


def moved(island: SimIsland) -> Counter[str]:
    """Counts the bytes of each kind of copy."""
    found: Counter[str] = Counter()

    def hear(now: float, event: Event, sends: list[Send]) -> None:
        if isinstance(event, Received) and isinstance(event.message, DecodeReport):
            found.update({each.what: each.num_bytes for each in event.message.moved})

    island.router.observers.append(hear)
    return found


@pytest.mark.drawn(one_in=4)
@pytest.mark.parametrize("seed", range(12))
def test_requests_that_share_blocks_run_with_their_own_kv(seed: int) -> None:
    """`SimEngine` looks at all KV of who shares blocks, at each of its iterations."""
    rng = random.Random(seed)
    island = shares_blocks(rng.choice([34, 40, 64]), enable_prefix_caching=seed % 2 == 0)
    asked = requests(60, every_s=rng.choice([0.002, 0.01]), output_len=rng.choice([20, 40, 100]))
    found = moved(island)
    # Prompts begin alike in both classes: each consists of one of four tokens.
    asked = [replace(each, prompt=[rng.randrange(4)] * len(each.prompt)) for each in asked]
    play(island, [replace(each, tier="be") if rng.random() < 0.6 else each for each in asked])
    assert found["checkpoint"] >= found["restore"]


def test_blocks_that_are_shared_spare_evictions() -> None:
    """A long best-effort request has 30 of 34 blocks, and short real time comes one after the other."""
    found = {}
    for share_blocks in (False, True):
        island = shares_blocks(34, share_blocks)
        copied = moved(island)
        job = make_request(1, 460, 30, arrival_s=0.0, tier="be")
        chats = [make_request(2 + i, 100, 20, arrival_s=0.3 + i, ttft_s=0.5, tbt_s=0.1) for i in range(4)]
        play(island, [job, *chats])
        found[share_blocks] = evictions(island), copied
    assert found[False][0] > 0 and found[True][0] == 0
    whole, ends = found[False][1], found[True][1]
    assert 0 < ends["checkpoint"] == ends["restore"] < whole["save"] and not ends["save"]


def test_who_can_not_share_blocks_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="policy 'fcfs' can't; it must be one of bros"):
        make_policy(SchedulingConfig("fcfs", share_blocks=True))
    with pytest.raises(ValueError, match="preemption_mode must be swap or defer, not recompute"):
        make_policy(SchedulingConfig("bros", share_blocks=True, preemption_mode="recompute"))
    with pytest.raises(ValueError, match="give --colocated-instances"):
        SchedulingConfig("bros", share_blocks=True).check_share_blocks(False, "auto")
    with pytest.raises(ValueError, match="pool_kv_dtype='int8': must be auto"):
        SchedulingConfig("bros", share_blocks=True).check_share_blocks(True, "int8")
