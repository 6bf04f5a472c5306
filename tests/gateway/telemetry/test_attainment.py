"""What the launcher is told of objectives."""

from __future__ import annotations

import pytest

from alignedserve.gateway.telemetry.metrics import AttainmentCount, TierMetrics
from alignedserve.gateway.telemetry.telemetry import Telemetry
from alignedserve.protocol.messages import Attainment
from alignedserve.sim.model import make_request


def test_each_is_told_once_whichever_objective_it_is() -> None:
    metrics = TierMetrics()
    count = AttainmentCount(metrics)
    assert count.take(are_late=False) == Attainment(0, 0, False)
    metrics.objectives["ttft", True] += 3
    metrics.objectives["tbt", True] += 2
    metrics.objectives["tbt", False] += 1
    assert count.take(are_late=True) == Attainment(5, 1, True)
    metrics.objectives["ttft", False] += 4
    assert count.take(are_late=False) == Attainment(0, 4, False)


@pytest.mark.parametrize(("reason", "num_missed"), [("full", 1), ("too_long", 0), ("slo", 0)])
def test_what_is_rejected_for_want_of_room_has_missed_an_objective(reason: str, num_missed: int) -> None:
    telemetry = Telemetry()
    metrics = telemetry.metrics.of("rt")
    count = AttainmentCount(metrics)
    telemetry.opened(make_request(1, 10, 5, 0.0)).rejected(reason)
    assert count.take(are_late=False) == Attainment(0, num_missed, False)
    assert metrics.ended["rejected"] == 1
