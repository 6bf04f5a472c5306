"""Which instances share a link, and the effects on an island."""

from __future__ import annotations

from math import inf
from statistics import fmean

import pytest
from msgspec.structs import replace
from pytest import approx

from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.host_links import HostLinks, Sharing
from alignedserve.sim.links import Crossing
from alignedserve.sim.report import Report, make_report
from alignedserve.sim.scenario import Scenario
from alignedserve.sim.segment import Content
from alignedserve.timing.cost import CostModel, HostResources
from alignedserve.timing.cost_presets import load_cost_model
from alignedserve.transport.completions import Outcome
from alignedserve.types import BlockId, InstanceId, RequestKey
from tests.sim.indirect import INDIRECT
from tests.sim.islands import BLOCK_SIZE, COST, small_island, with_slow_copies
from tests.sim.test_policies import mixed

A100_TP2 = load_cost_model("opt-13b/a100-80gb-tp2")
H100_TP4 = load_cost_model("llama-2-70b/h100-80gb-tp4")
PCIE = 25e9
IDS = [InstanceId(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")]


def weights(crossings: tuple[Crossing, ...]) -> dict[str, float]:
    return {each.link.name: each.weight for each in crossings}


def test_neighbours_share_a_root_and_all_share_the_hosts_memory() -> None:
    links = HostLinks(COST, Sharing(), IDS)
    first, second, third, _ = (links.ports[each] for each in IDS)
    assert weights(first.from_pool) == {"host memory": 1.0, "PCIe 0 to GPUs": 1.0}
    assert weights(third.to_pool) == {"host memory": 1.0, "PCIe 1 to host": 1.0}
    assert first.from_pool[1].link is second.from_pool[1].link is not third.from_pool[1].link
    assert first.from_pool[0].link is third.to_pool[0].link
    assert first.from_pool[1].link is not first.to_pool[1].link
    assert weights(first.nvlink_out) == {"NVLink out of prefill-0": 1.0}
    rates = {link.name: link.bytes_per_s for link in links.links}
    assert len(rates) == 1 + 2 * 2 + 2 * 4
    assert rates["PCIe 0 to GPUs"] == rates["PCIe 1 to host"] == PCIE
    assert rates["NVLink into decode-1"] == 240e9 and rates["host memory"] == 327e9


def test_what_the_operator_says_goes_before_the_cost_model() -> None:
    links = HostLinks(COST, Sharing(gpus_per_pcie_root=1, host_memory_bytes_per_s=30e9), IDS)
    assert weights(links.ports[IDS[3]].from_pool) == {"host memory": 1.0, "PCIe 3 to GPUs": 1.0}
    assert links.links[0].bytes_per_s == 30e9
    assert all(link.bytes_per_s == inf for link in HostLinks(COST, Sharing(is_on=False), IDS).links)
    unsaid = HostLinks(replace(COST, host=HostResources()), Sharing(), IDS)
    assert unsaid.links[0].bytes_per_s == inf and len(unsaid.links) == 1 + 2 * 4 + 2 * 4


def test_an_instance_of_several_gpus_uses_the_roots_of_all() -> None:
    # both GPUs of an instance share one x16
    both = HostLinks(A100_TP2, Sharing(), IDS).ports[IDS[1]]
    assert weights(both.from_pool) == {"host memory": 1.0, "PCIe 1 to GPUs": 1.0}
    assert both.from_pool[1].link.bytes_per_s == PCIE
    each_its_own = HostLinks(H100_TP4, Sharing(), IDS).ports[IDS[0]]
    assert weights(each_its_own.to_pool) == {"host memory": 1.0} | {
        f"PCIe {root} to host": 0.25 for root in range(4)
    }
    uneven = HostLinks(H100_TP4, Sharing(gpus_per_pcie_root=3), IDS).ports[IDS[1]]
    assert weights(uneven.to_pool) == {"host memory": 1.0, "PCIe 1 to host": 0.5, "PCIe 2 to host": 0.5}


# ---- what an island feels -------------------------------------------------------------------------------------------

BATCH_BYTES = 10**10


def staging_s(sharing: Sharing, saving: tuple[str, ...] = ()) -> float:
    """Seconds in which a batch is staged on prefill-0 while these instances save as much."""
    island = small_island(num_prefill=2, num_decode=2, sharing=sharing)
    channels, ports, ended_s = COST.channels, island.host.ports, list[float]()

    def staged() -> None:
        ended_s.append(island.now)

    for each in saving:
        crossings = ports[InstanceId(each)].to_pool
        island.world.carrier.start(BATCH_BYTES, channels.save, crossings, lambda: None)
    island.world.carrier.start(BATCH_BYTES, channels.stage, ports[IDS[0]].from_pool, staged)
    island.run(60.0)
    return ended_s[0]


def test_staging_beside_saves_takes_longer_than_alone() -> None:
    alone_s = COST.channels.stage.seconds(BATCH_BYTES)
    everywhere = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    for sharing in (Sharing(), Sharing(host_memory_bytes_per_s=PCIE)):
        assert staging_s(sharing) == alone_s
    # PCIe goes both ways at once, and this host's memory has room
    assert staging_s(Sharing(), everywhere) == alone_s
    assert staging_s(Sharing(is_on=False, host_memory_bytes_per_s=PCIE), everywhere) == alone_s
    beside_s = staging_s(Sharing(host_memory_bytes_per_s=PCIE), everywhere[1:2])
    assert beside_s - COST.channels.stage.latency_s == 2 * BATCH_BYTES / PCIE
    # two of the saves share a root: each has a quarter of the memory's bandwidth, as the two others have
    slow = Sharing(host_memory_bytes_per_s=PCIE / 2)
    assert staging_s(slow, everywhere[1:]) > 7.9 * BATCH_BYTES / PCIE


def pull_s(*ways: tuple[str, str]) -> list[float]:
    """Seconds that each of these pulls of a block takes, begun together: (from, to)."""
    island = small_island(link="nccl", num_prefill=2, num_decode=2)
    island.start()
    # until all are connected: whatever is under way then is void
    island.run(0.1)
    outcomes: list[Outcome] = []
    for number, (source, to) in enumerate(ways, 1):
        key, block = RequestKey(number), BlockId(number)
        sender = island.world.transfers[InstanceId(source)]
        sender.engine.contents[block] = Content(key, place=0, num_tokens=BLOCK_SIZE)
        sender.staging_buffer.put(key, [block], lambda _: None)
        receiver = island.world.transfers[InstanceId(to)]
        receiver.pull(InstanceId(source), "", [(key, [block])], outcomes.append)
    island.run(1.0)
    return [each.seconds for each in sorted(outcomes, key=lambda each: each.keys)]


def test_pulls_share_the_ports_at_both_ends() -> None:
    latency_s, bytes_s = COST.channels.admit.latency_s, BLOCK_SIZE * COST.kv_bytes_per_token / 240e9
    alone_s, halved_s = approx(latency_s + bytes_s), approx(latency_s + 2 * bytes_s)
    assert pull_s(("prefill-0", "decode-0")) == [alone_s]
    assert pull_s(("prefill-0", "decode-0"), ("prefill-1", "decode-1")) == [alone_s] * 2
    # into one instance, and out of one
    assert pull_s(("prefill-0", "decode-0"), ("prefill-1", "decode-0")) == [halved_s] * 2
    assert pull_s(("prefill-0", "decode-0"), ("prefill-0", "decode-1")) == [halved_s] * 2
    # one connection carries out its pulls one after the other
    assert pull_s(("prefill-0", "decode-0"), ("prefill-0", "decode-0")) == [alone_s] * 2


def simulated(cost: CostModel, sharing: Sharing) -> tuple[Report, float]:
    """With the mean of the seconds between the order to stage and its report, where all is staged."""
    scenario = Scenario(
        cost,
        RouterConfig(link="nccl"),
        num_prefill=2,
        num_decode=2,
        sharing=sharing,
        scheduling=SchedulingConfig(INDIRECT),
    )
    ran = scenario.simulate(mixed(120, rate=6.0))
    waits_s = []
    for events in ran.lifetimes.events.values():
        times_s = {event.name: event.time_s for event in events}
        waits_s.append(times_s["staged"] - times_s["stage begins"])
    return make_report(ran.streams, ran.lifetimes, scenario.slo), fmean(waits_s)


@pytest.mark.slow
def test_prompts_that_are_saved_delay_what_is_staged() -> None:
    apart, apart_s = simulated(COST, Sharing(is_on=False))
    shared, shared_s = simulated(COST, Sharing())
    narrow, narrow_s = simulated(COST, Sharing(host_memory_bytes_per_s=10e9))
    assert apart_s < shared_s < narrow_s / 3
    assert apart.tpot_s.mean < shared.tpot_s.mean < narrow.tpot_s.mean / 1.5
    assert narrow.attainment < apart.attainment == 1.0


@pytest.mark.slow
def test_a_tenth_of_the_bandwidth_costs_more_where_it_is_shared() -> None:
    slow = with_slow_copies(COST, slowdown=10)
    wide, narrow = (simulated(cost, Sharing())[0] for cost in (COST, slow))
    narrow_apart = simulated(slow, Sharing(is_on=False))[0]
    assert narrow.attainment < narrow_apart.attainment < wide.attainment
    # First tokens wait for no copy.
    assert narrow.ttft_s.mean == narrow_apart.ttft_s.mean >= wide.ttft_s.mean
    assert narrow.tpot_s.mean > narrow_apart.tpot_s.mean > wide.tpot_s.mean
    assert narrow.tokens_per_s < narrow_apart.tokens_per_s < wide.tokens_per_s
