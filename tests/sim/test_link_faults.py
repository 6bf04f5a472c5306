"""Copies over the link fail for a while: KV goes through host memory meanwhile, and over the link again afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from alignedserve.protocol.messages import Offer
from alignedserve.router.events import Event, Send
from alignedserve.router.link_health import FIRST_PAUSE_S
from alignedserve.sim.clock import Clock
from alignedserve.sim.faults import NoFaults
from alignedserve.sim.island import SimIsland
from alignedserve.types import RequestKey
from tests.sim.islands import finish, requests, small_island

# The seconds in which all pulls fail.
FAILS_S = (2.0, 40.0)
# The link is tried after the first pause, while it fails still, and then after twice that, within a few seconds.
LAST_TRIAL_S = FAILS_S[0] + 3 * FIRST_PAUSE_S
A_FEW_S = 5.0
END_S = LAST_TRIAL_S + A_FEW_S + 15.0


class FailingPulls(NoFaults):
    """At their start or half-way."""

    def __init__(self, clock: Clock, share: float) -> None:
        self._clock = clock
        self._share = share
        self.num_failed = 0

    def copy_share(self, what: str, key: RequestKey) -> float | None:
        if what != "pull" or not FAILS_S[0] <= self._clock.now < FAILS_S[1]:
            return None
        self.num_failed += 1
        return self._share


class Ways:
    """When requests were offered from where."""

    def __init__(self, island: SimIsland) -> None:
        self.offers: list[tuple[float, bool]] = []
        island.router.observers.append(self)

    def __call__(self, now: float, event: Event, sends: Iterable[Send]) -> None:
        offers = (send.message for send in sends if isinstance(send.message, Offer))
        self.offers += [(now, offer.source is not None) for offer in offers for _ in offer.works]

    def between(self, low_s: float, high_s: float) -> Counter[bool]:
        """How many were offered over the link, and how many not."""
        return Counter(is_over_link for at_s, is_over_link in self.offers if low_s <= at_s < high_s)


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("policy", ["aligned", "fcfs"])
def test_kv_goes_through_host_memory_as_long_as_the_link_fails(policy: str, share: float) -> None:
    island = small_island(policy, "ipc")
    faults = island.world.faults = FailingPulls(island.world.clock, share)
    ways = Ways(island)
    num_requests = int(4 * END_S)
    island.submit(requests(num_requests, every_s=0.25))
    island.start()
    island.run(END_S)
    (stats,) = (island.router.core.state.counters.of(each.instance_id) for each in island.decodes)  # type: ignore[union-attr]
    finish(island, num_requests, limit_s=END_S + 60.0)
    before, during = (0.0, FAILS_S[0]), (FAILS_S[0] + A_FEW_S, LAST_TRIAL_S)
    after = LAST_TRIAL_S + A_FEW_S, END_S
    assert ways.between(*before)[True] and not ways.between(*before)[False]
    assert ways.between(*during)[True] <= 2 < 100 < ways.between(*during)[False], "trials only"
    assert ways.between(*after)[True] > 50 and not ways.between(*after)[False]
    # Two in a row, each perhaps of several requests by themselves, and the first trial.
    assert 3 <= stats.num_failed_pulls == faults.num_failed <= 20


@pytest.mark.slow
def test_of_two_prefill_instances_both_are_tried() -> None:
    island = small_island(link="ipc", num_prefill=2, num_decode=2)
    faults = island.world.faults = FailingPulls(island.world.clock, 0.5)
    ways = Ways(island)
    num_requests = int(4 * END_S)
    island.submit(requests(num_requests, every_s=0.25))
    island.start()
    assert island.run_until_done(num_requests, END_S + 60.0)
    island.settle()
    island.check_idle()
    assert all(stream.is_complete for stream in island.streams)
    assert faults.num_failed >= 8, "twice of each pair"
    after = ways.between(LAST_TRIAL_S + A_FEW_S, END_S)
    assert after[True] and not after[False]
