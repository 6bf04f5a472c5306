"""Simulated instances are the real ones: everything they do besides planning can be seen in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.prefill_worker.worker import PrefillWorker
from alignedserve.protocol.messages import AnyMessage, Request
from alignedserve.sim.executor import SimEngine
from alignedserve.sim.grammars import COMPILE_S
from alignedserve.sim.instance import SimInstance
from alignedserve.sim.island import SimIsland
from alignedserve.sim.model import make_request
from alignedserve.sim.transfers import SimTransfers
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.timing.estimate import Estimate
from alignedserve.transport.completions import Done, Outcome, TransferIds
from alignedserve.types import Epoch, InstanceId
from tests.sim.islands import limits, play, small_island

NUM_OUTPUT = 5
LIMIT_S = 60.0
# room for all of a test's prompts at once
ROOMY: dict[str, Any] = {
    "prefill": limits(num_blocks=256, max_num_batched_tokens=256),
    "decode": limits(num_blocks=256),
}


def asking(*prompts: list[int], every_s: float = 0.0) -> list[Request]:
    plain = [
        make_request(number, len(prompt), NUM_OUTPUT, arrival_s=every_s * number)
        for number, prompt in enumerate(prompts, 1)
    ]
    return [replace(request, prompt=prompt) for request, prompt in zip(plain, prompts, strict=True)]


def num_computed(island: SimIsland) -> int:
    return island.world.computed.total()


BEGINNING = [7] * 160


@pytest.mark.parametrize("every_s", [0.0, 2.0], ids=["together", "one after the other"])
def test_prompts_that_begin_alike_share_kv(every_s: float) -> None:
    prompts = [BEGINNING + [number] * 40 for number in range(6)]
    alone = play(small_island(**ROOMY), asking(*prompts, every_s=every_s), limit_s=LIMIT_S)
    together = play(
        small_island(enable_prefix_caching=True, **ROOMY), asking(*prompts, every_s=every_s), limit_s=LIMIT_S
    )
    assert num_computed(alone) - num_computed(together) == 5 * len(BEGINNING)


@pytest.mark.parametrize("is_pool_lost", [False, True])
def test_a_restarted_instance_has_forgotten_what_could_be_shared_and_the_pool_has_not(
    is_pool_lost: bool,
) -> None:
    island = small_island(enable_prefix_caching=True, **ROOMY)
    prefill = island.world.processes[InstanceId("prefill-0")]
    island.world.clock.at(3.0, prefill.kill)
    island.world.clock.at(3.1, prefill.start)
    if is_pool_lost:
        island.world.clock.at(3.0, island.pool.kill)
        island.world.clock.at(3.05, island.pool.lose_segment)
        island.world.clock.at(3.1, island.pool.start)
    play(island, asking(BEGINNING, BEGINNING, BEGINNING, every_s=2.0), limit_s=LIMIT_S)
    # of the last block one token at least is computed
    num_shared = (1 if is_pool_lost else 2) * (len(BEGINNING) - 16)
    assert num_computed(island) == 3 * (len(BEGINNING) + NUM_OUTPUT - 1) - num_shared


def test_another_router_finds_what_can_be_shared() -> None:
    island = small_island(enable_prefix_caching=True, **ROOMY)
    island.world.clock.at(3.0, island.router.kill)
    island.world.clock.at(3.1, island.router.start)
    play(island, asking(BEGINNING, BEGINNING, BEGINNING, every_s=2.0), limit_s=LIMIT_S)
    num_shared = 2 * (len(BEGINNING) - 16)
    assert num_computed(island) == 3 * (len(BEGINNING) + NUM_OUTPUT - 1) - num_shared


def test_whoever_waits_for_its_grammar_keeps_nobody() -> None:
    constrained, plain = asking([1] * 40, [2] * 40)
    params = constrained.params
    params.structured_outputs = StructuredOutputsParams(regex="a*")
    island = play(small_island(**ROOMY), [constrained, plain], limit_s=LIMIT_S)
    first_s = {stream.request.key: stream.times_s[0] for stream in island.streams}
    assert first_s[plain.key] < COMPILE_S < first_s[constrained.key] < 3 * COMPILE_S


# ---- the same state machine ------------------------------------------------------------------------------------------


class Recorded:
    """What a simulated instance was told, and said: a boundary at a time."""

    def __init__(self, instance: SimInstance) -> None:
        self.instance = instance
        self.boundaries: list[Boundary] = []
        worker, completions = instance.worker, instance.transfers.completions
        on, take_outcomes, begin, finish = worker.on, worker.take_outcomes, worker.begin, worker.finish
        post = completions.post
        self._orders: list[AnyMessage] = []
        self._outcomes: list[Outcome] = []

        def noted_on(order: AnyMessage) -> None:
            self._orders.append(order)
            on(order)

        def noted_post(done: Done, outcome: Outcome) -> None:
            def noted_done(outcome: Outcome) -> None:
                self._outcomes.append(outcome)
                done(outcome)

            post(noted_done, outcome)

        def noted_take_outcomes() -> list[AnyMessage]:
            before = list[Outcome]()
            self._outcomes = before
            boundary = Boundary(worker._clock(), self._orders, before)
            self._orders = []
            self.boundaries.append(boundary)
            boundary.urgent = take_outcomes()
            return boundary.urgent

        def noted_begin() -> Any:
            step = begin()
            self._outcomes = self.boundaries[-1].outcomes_beside
            return step

        def noted_finish(step: Any) -> tuple[list[AnyMessage], bool]:
            boundary = self.boundaries[-1]
            boundary.end_s = worker._clock()
            messages, goes_on = finish(step)
            boundary.said = boundary.urgent + messages, goes_on
            return messages, goes_on

        worker.on, worker.take_outcomes = noted_on, noted_take_outcomes  # type: ignore[method-assign]
        worker.begin, worker.finish = noted_begin, noted_finish  # type: ignore[method-assign]
        completions.post = noted_post  # type: ignore[method-assign]


class Boundary:
    def __init__(self, begun_s: float, orders: list[AnyMessage], outcomes: list[Outcome]) -> None:
        self.begun_s = self.end_s = begun_s
        self.orders, self.outcomes = orders, outcomes
        # those that came while it computed
        self.outcomes_beside: list[Outcome] = []
        # those that were sent before it computed, and all of them
        self.urgent: list[AnyMessage] = []
        self.said: tuple[list[AnyMessage], bool] = ([], False)


class Script(SimTransfers):
    """Copies end when the script says so."""

    def __init__(self, instance: SimInstance, engine: SimEngine) -> None:
        super().__init__(instance.world, TransferIds(Epoch(1)), engine, instance._channels, wake=lambda: None)
        self._open: dict[tuple[str, tuple[Any, ...]], list[Done]] = {}

    def load(self, key: Any, pairs: Any, done: Done, is_urgent: bool = False) -> None:
        self._open.setdefault(("load", (key,)), []).append(done)

    def save(self, key: Any, pairs: Any, num_empty: int, done: Done, is_urgent: bool = False) -> None:
        self._open.setdefault(("save", (key,)), []).append(done)

    def abandon(self, key: Any) -> None:
        pass

    def deliver(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.what != "send":
                self.completions.post(self._open[outcome.what, outcome.keys].pop(0), outcome)


def test_a_live_step_says_what_the_simulated_one_said() -> None:
    """The same orders, clock and outcomes of copies, to the very class that runs live, by `step`."""
    island = small_island(
        policy="fcfs", decode=limits(num_blocks=34), pool_blocks=40, enable_prefix_caching=True
    )
    prefill = island.prefills[0]
    requests = asking(*([number] * (60 + 7 * number) for number in range(1, 25)), every_s=0.02)
    island.submit(requests)
    island.start()
    recorded = Recorded(prefill)
    assert island.run_until_done(len(requests), 60.0)

    now = [0.0]
    engine = SimEngine(prefill._limits, island.world.cost, type(island.world.computed)())
    script = Script(prefill, engine)
    worker = PrefillWorker(
        engine,
        script,
        prefill._make_policy(),
        Estimate(island.world.cost),
        lambda: now[0],
        enable_prefix_caching=True,
    )
    finish_engine = engine.finish
    assert len(recorded.boundaries) > 40
    assert any(boundary.urgent for boundary in recorded.boundaries)
    for boundary in recorded.boundaries:
        now[0] = boundary.begun_s
        for order in boundary.orders:
            worker.on(order)
        script.deliver(boundary.outcomes)

        def computed(iteration: Any, boundary: Boundary = boundary) -> Any:
            now[0] = boundary.end_s
            script.deliver(boundary.outcomes_beside)
            return finish_engine(iteration)

        engine.finish = computed  # type: ignore[method-assign]
        assert worker.step() == boundary.said
    worker.check_idle()
