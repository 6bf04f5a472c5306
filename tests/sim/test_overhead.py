"""What iterations take beyond the cost model: as live, each waits for it once, and instances learn of it."""

from __future__ import annotations

import pytest

from alignedserve.protocol.messages import DecodeReport
from alignedserve.router.events import Event, Received, Send
from alignedserve.sim.model import make_request
from alignedserve.sim.world import NO_OVERHEAD, Overhead
from tests.sim.islands import COST, limits, small_island

PACE, OUTSIDE_S = 1.5, 0.004
PROMPT_LEN, OUTPUT_LEN = 100, 200


def test_a_request_alone_waits_for_it_in_each_iteration_and_the_instance_learns_it() -> None:
    island = small_island(num_colocated=1, overhead=Overhead(PACE, OUTSIDE_S))
    reports: list[DecodeReport] = []

    def observe(now: float, event: Event, sends: list[Send]) -> None:
        if isinstance(event, Received) and isinstance(event.message, DecodeReport):
            reports.append(event.message)

    island.router.observers.append(observe)
    island.submit([make_request(1, PROMPT_LEN, OUTPUT_LEN, arrival_s=1.0)])
    island.start()
    assert island.run_until_done(1, 100.0)
    (stream,) = island.streams
    computing_s = PACE * COST.iteration([(0, PROMPT_LEN)], [])
    assert stream.times_s[0] - 1.0 == pytest.approx(
        OUTSIDE_S + computing_s + 4 * NO_OVERHEAD.message_s, abs=1e-6
    )
    gap_s = stream.times_s[10] - stream.times_s[9]
    assert gap_s == pytest.approx(OUTSIDE_S + PACE * COST.iteration([], [PROMPT_LEN + 10]), abs=1e-6)
    assert reports[-1].pace == pytest.approx(PACE, rel=0.01)
    assert reports[-1].outside_s == pytest.approx(OUTSIDE_S, rel=0.01)


def test_prompts_that_are_alone_are_computed_in_one_piece_on_a_slow_machine() -> None:
    """Real time with objectives, at an instance that has just learned that it is twice as slow as its profile."""
    island = small_island(
        num_colocated=1,
        decode=limits(max_num_batched_tokens=512),
        overhead=Overhead(pace=2.0, outside_s=0.005),
    )
    iterations: list[DecodeReport] = []

    def observe(now: float, event: Event, sends: list[Send]) -> None:
        if (
            isinstance(event, Received)
            and isinstance(event.message, DecodeReport)
            and event.message.num_computed
        ):
            iterations.append(event.message)

    island.router.observers.append(observe)
    island.submit(
        [make_request(key, 400, 60, arrival_s=10.0 * key, ttft_s=1.0, tbt_s=0.1) for key in (1, 2, 3)]
    )
    island.start()
    assert island.run_until_done(3, 100.0)
    assert [each.num_computed for each in iterations if each.num_computed > 1] == [400, 400, 400]
