"""Shares worked out by hand, and properties of any shares."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.sim.carrier import Carrier
from alignedserve.sim.clock import Clock
from alignedserve.sim.links import Crossing, Flow, SharedLink, SharedLinks, fair_rates
from alignedserve.timing.cost import CopyChannel


def joined(links: SharedLinks, *crossed: SharedLink, peak: float = 10.0, num_bytes: int = 100) -> Flow:
    flow = Flow(num_bytes, CopyChannel(0.0, peak), [Crossing(link) for link in crossed], begun_s=0.0)
    links.join(flow, 0.0)
    return flow


def test_two_flows_over_one_link_halve_it_and_the_rest_goes_on_alone() -> None:
    links, root = SharedLinks(), SharedLink("root", 10.0)
    short, long = joined(links, root, num_bytes=50), joined(links, root, num_bytes=100)
    assert (short.rate, long.rate) == (5.0, 5.0) and (short.end_s, long.end_s) == (10.0, 20.0)
    assert links.leave(short, 10.0) == [long]
    # the 50 bytes that are left move at the full rate
    assert long.rate == 10.0 and long.end_s == 15.0
    assert links.leave(long, 15.0) == []
    assert (root.num_bytes, root.busy_s, root.limiting_s) == (150.0, 15.0, 10.0)


def test_what_a_slow_flow_leaves_goes_to_the_others() -> None:
    links, root = SharedLinks(), SharedLink("root", 10.0)
    flows = [joined(links, root, peak=peak) for peak in (1.0, 20.0, 20.0)]
    assert [flow.rate for flow in flows] == [1.0, 4.5, 4.5]


def test_a_flow_that_is_bound_elsewhere_leaves_its_share() -> None:
    links, narrow, wide = SharedLinks(), SharedLink("narrow", 4.0), SharedLink("wide", 10.0)
    both, only_narrow, only_wide = (
        joined(links, narrow, wide),
        joined(links, narrow),
        joined(links, wide),
    )
    assert (both.rate, only_narrow.rate, only_wide.rate) == (2.0, 2.0, 8.0)
    assert (narrow.load, wide.load) == (4.0, 10.0) and narrow.is_limiting and wide.is_limiting
    assert set(links.leave(only_narrow, 1.0)) == {both, only_wide}
    assert (both.rate, only_wide.rate) == (4.0, 6.0)


def test_a_link_that_half_of_the_parts_cross_carries_half_of_the_bytes() -> None:
    links, roots = SharedLinks(), [SharedLink("0", 10.0), SharedLink("1", 10.0)]
    flow = Flow(100, CopyChannel(0.0, 20.0), [Crossing(root, 0.5) for root in roots], begun_s=0.0)
    links.join(flow, 0.0)
    assert flow.rate == 20.0 and roots[0].load == roots[1].load == 10.0
    other = joined(links, roots[0])
    assert other.rate == flow.rate == pytest.approx(10 / 1.5) and roots[1].load == flow.rate / 2
    assert (roots[0].is_limiting, roots[1].is_limiting) == (True, False)


def test_links_that_are_full_at_once_are_all_limiting() -> None:
    links, roots = SharedLinks(), [SharedLink("0", 10.0), SharedLink("1", 10.0)]
    flow = Flow(100, CopyChannel(0.0, 40.0), [Crossing(root, 0.5) for root in roots], begun_s=0.0)
    links.join(flow, 0.0)
    assert flow.rate == 20.0 and roots[0].is_limiting and roots[1].is_limiting


def test_a_flow_that_is_stopped_gives_its_share_back() -> None:
    clock, root, ended = Clock(), SharedLink("root", 10.0), list[tuple[str, float]]()
    carrier = Carrier(clock)

    def start(name: str, num_bytes: int) -> Flow:
        return carrier.start(
            num_bytes, CopyChannel(1.0, 10.0), [Crossing(root)], lambda: ended.append((name, clock.now))
        )

    stopped, unbegun = start("stopped", 1000), start("unbegun", 1000)
    start("kept", 100)
    with pytest.raises(RuntimeError, match="idle, but 3 copies are on their way"):
        carrier.check_idle()
    # its first byte would have moved at 1.0
    clock.at(0.5, lambda: carrier.stop(unbegun))
    clock.at(5.0, lambda: carrier.stop(stopped))
    clock.run_until(100.0)
    # 4 s at half of the rate, and what is left at all of it
    assert ended == [("kept", 1.0 + 4.0 + 8.0)]
    assert not root.flows and root.num_bytes == 120.0
    carrier.check_idle()


# ---- what always holds ----------------------------------------------------------------------------------------------

shares = st.sampled_from([0.25, 0.5, 1.0])
rates = st.floats(0.5, 50.0)


@dataclass(frozen=True)
class Plan:
    """A flow that may come."""

    begun_s: float
    num_bytes: int
    channel: CopyChannel
    # link's number -> weight
    crossed: dict[int, float]


plans = st.builds(
    Plan,
    st.floats(0.0, 20.0),
    st.integers(0, 300),
    st.builds(CopyChannel, st.sampled_from([0.0, 0.5]), rates),
    st.dictionaries(st.integers(0, 3), shares, max_size=3),
)


class Run:
    """Carries flows to their ends, and checks the rates at every event."""

    def __init__(self, capacities: list[float], plans: list[Plan]) -> None:
        self.clock = Clock()
        self.links = [SharedLink(str(index), capacity) for index, capacity in enumerate(capacities)]
        self.ended_s: dict[int, float] = {}
        carrier = Carrier(self.clock)
        for index, plan in enumerate(plans):
            self.clock.at(plan.begun_s, lambda index=index, plan=plan: self._start(carrier, index, plan))  # type: ignore[misc]
        while self.clock.step():
            self._check()

    def _start(self, carrier: Carrier, index: int, plan: Plan) -> None:
        crossings = [Crossing(self.links[link], weight) for link, weight in plan.crossed.items()]
        carrier.start(
            plan.num_bytes,
            plan.channel,
            crossings,
            lambda: self.ended_s.update({index: self.clock.now}),
        )

    def _check(self) -> None:
        flows = dict.fromkeys(flow for link in self.links for flow in link.flows)
        for link in self.links:
            load = sum(weight * flow.rate for flow, weight in link.flows.items())
            assert link.load == pytest.approx(load) and load <= link.bytes_per_s * (1 + 1e-9)
        for flow in flows:
            assert 0 < flow.rate <= flow.peak
            assert flow.rate == flow.peak or any(is_bound(flow, each.link) for each in flow.crossings)
        # the shorter ways give what sharing everything anew would
        anew, limiting = fair_rates(flows)
        assert [flow.rate for flow in flows] == pytest.approx([anew[flow] for flow in flows])
        assert all(link.is_limiting for link in limiting)


def is_bound(flow: Flow, link: SharedLink) -> bool:
    """The link is full, and nobody on it has more."""
    is_full = link.load >= link.bytes_per_s * (1 - 1e-9)
    return is_full and flow.rate >= max(each.rate for each in link.flows) * (1 - 1e-9)


@given(st.lists(rates, min_size=4, max_size=4), st.lists(plans, max_size=8))
def test_rates_are_max_min_fair_and_every_byte_arrives(capacities: list[float], plans: list[Plan]) -> None:
    run = Run(capacities, plans)
    for index, plan in enumerate(plans):
        least_s = plan.begun_s + plan.channel.seconds(plan.num_bytes)
        assert run.ended_s[index] >= least_s - 1e-9
    for number, link in enumerate(run.links):
        expected = sum(plan.num_bytes * plan.crossed.get(number, 0.0) for plan in plans)
        assert link.num_bytes == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert not link.flows and not link.load


@given(st.lists(plans, max_size=8))
def test_over_infinite_links_every_flow_takes_what_its_channel_says(plans: list[Plan]) -> None:
    run = Run([inf] * 4, plans)
    for index, plan in enumerate(plans):
        assert run.ended_s[index] == plan.begun_s + plan.channel.seconds(plan.num_bytes)


@given(st.lists(rates, min_size=4, max_size=4), plans)
def test_alone_it_does_too_where_every_link_has_room(capacities: list[float], plan: Plan) -> None:
    roomy = [max(capacity, plan.channel.bytes_per_s) for capacity in capacities]
    assert Run(roomy, [plan]).ended_s[0] == plan.begun_s + plan.channel.seconds(plan.num_bytes)


@given(st.lists(rates, min_size=4, max_size=4), st.lists(plans, max_size=8))
def test_the_same_flows_end_at_the_same_times(capacities: list[float], plans: list[Plan]) -> None:
    assert Run(capacities, plans).ended_s == Run(capacities, plans).ended_s
