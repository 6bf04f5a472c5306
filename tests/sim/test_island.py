from __future__ import annotations

import pytest

from alignedserve.sim.island import SimIsland
from alignedserve.sim.lifetime import Lifetimes
from alignedserve.sim.model import make_request
from alignedserve.types import InstanceId, RequestKey
from tests.sim.islands import finish, limits, requests, small_island


def run(island: SimIsland, num_requests: int, limit_s: float = 300.0) -> None:
    island.start()
    assert island.run_until_done(num_requests, limit_s), (
        f"{island.num_open} requests are open after {limit_s} s"
    )
    island.settle()
    island.check_idle()


@pytest.mark.parametrize("policy", ["aligned", "fcfs"])
@pytest.mark.parametrize("link", ["host", "gloo"])
def test_every_request_gets_its_tokens(policy: str, link: str) -> None:
    island = small_island(policy, link)
    island.submit(requests(40))
    run(island, 40)
    assert all(stream.is_complete for stream in island.streams)


def test_two_of_each_instance_work_together() -> None:
    island = small_island(num_prefill=2, num_decode=2, num_gateways=2)
    island.submit(requests(60, every_s=0.01))
    run(island, 60)
    assert all(stream.is_complete for stream in island.streams)


@pytest.mark.slow
def test_short_memory_delays_but_loses_nothing() -> None:
    island = small_island(decode=limits(num_blocks=34), pool_blocks=40)
    island.submit(requests(30, every_s=0.0, prompt_len=200, output_len=200))
    run(island, 30, limit_s=1000.0)
    assert all(stream.is_complete for stream in island.streams)


@pytest.mark.parametrize("staging_share", [0.0, 0.2])
def test_a_small_staging_buffer_delays_nothing(staging_share: float) -> None:
    """Some of the requests do not fit into it at all."""
    island = small_island(link="gloo", staging_share=staging_share)
    lifetimes = Lifetimes()
    island.router.observers.append(lifetimes)
    island.submit(requests(40, prompt_len=200))
    run(island, 40)
    assert all(stream.is_complete for stream in island.streams)
    assert bool(lifetimes.count("staged")) == bool(staging_share)
    assert lifetimes.count("staged") < 40


def test_an_aborted_request_leaves_nothing() -> None:
    island = small_island()
    island.submit(requests(20, every_s=0.02))
    for key in range(1, 21, 3):
        island.world.clock.at(0.1 * key, lambda key=key: island.gateways[0].abort(key))  # type: ignore[misc]
    run(island, 20)
    outcomes = {stream.outcome for stream in island.streams}
    assert outcomes == {"stop", "abort"}


@pytest.mark.parametrize("link", ["host", "gloo"])
@pytest.mark.parametrize("aborted_s", [0.0, 0.1, 0.3, 0.5])
def test_what_is_aborted_is_gone_within_a_second(aborted_s: float, link: str) -> None:
    island = small_island(link=link)
    island.submit(requests(20, every_s=0.0, output_len=300))
    island.start()
    island.run(aborted_s)
    for key in range(1, 21):
        island.gateways[0].abort(RequestKey(key))
    island.run(1.0)
    island.check_idle()


def test_max_tokens_and_the_models_length_end_a_request() -> None:
    island = small_island()
    island.submit(
        [
            make_request(1, 50, num_output_tokens=100, arrival_s=0.0, max_tokens=7),
            make_request(2, 500, num_output_tokens=100, arrival_s=0.0),
            make_request(3, 50, num_output_tokens=1, arrival_s=0.0),
        ]
    )
    run(island, 3)
    assert [(stream.outcome, len(stream.tokens)) for stream in island.streams] == [
        ("length", 7),
        ("length", 12),
        ("stop", 1),
    ]


@pytest.mark.parametrize("link", ["host", "gloo"])
@pytest.mark.parametrize("victim", ["decode-0", "prefill-0", "kvpool-0"])
def test_a_death_in_mid_stream_costs_no_token(victim: str, link: str) -> None:
    island = small_island(link=link)
    island.submit(requests(16, every_s=0.0))
    island.start()
    process = island.world.processes[InstanceId(victim)]
    island.world.clock.at(0.4, process.kill)
    island.world.clock.at(0.9, process.start)
    finish(island, 16, limit_s=300.0)


def test_a_lost_segment_costs_no_token() -> None:
    island = small_island()
    island.submit(requests(16, every_s=0.0))
    island.start()
    island.run(0.4)
    island.pool.kill()
    island.pool.lose_segment()
    island.run(0.5)
    island.pool.start()
    finish(island, 16, limit_s=300.0)


def test_the_routers_death_costs_no_token() -> None:
    island = small_island(num_decode=2)
    island.submit(requests(16, every_s=0.0))
    island.start()
    island.run(0.4)
    island.router.kill()
    island.run(0.5)
    island.router.start()
    finish(island, 16, limit_s=300.0)


def test_the_gateways_death_leaves_nothing() -> None:
    island = small_island(num_gateways=2)
    island.submit(requests(16, every_s=0.0))
    island.start()
    island.run(0.4)
    island.gateways[0].kill()
    assert island.run_until_done(16, 300.0)
    island.settle()
    island.check_idle()
    assert {stream.outcome for stream in island.gateways[0].streams.values()} == {"lost"}
    assert all(stream.is_complete for stream in island.gateways[1].streams.values())


def test_kv_of_a_flipped_bit_is_forbidden_in_later_eras_also_those_of_a_later_router() -> None:
    island, key = small_island(check_share=0.3), RequestKey(1)
    island.submit(requests(1, output_len=400))
    island.start()
    island.run(0.5)
    island.world.flip_bit(island.pool.segment, 0)
    for _ in range(2):
        core = island.router.core
        assert core
        island.world.kv.check_flaw(key, 1)
        core.state.requests[key].era = 1
        with pytest.raises(RuntimeError, match="comes from flipped bit 1"):
            island.world.kv.check_flaw(key, 1)
        island.router.kill()
        island.router.start()
        island.run(1.0)
