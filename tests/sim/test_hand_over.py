"""Direct transfers between instances in virtual time: what they save, and that their failures cost no token."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.prefill_worker.worker import PrefillWorker
from alignedserve.router.requests import Phase, RequestState
from alignedserve.router.router import Router
from alignedserve.sim.faults import NoFaults
from alignedserve.sim.island import SimIsland
from alignedserve.types import InstanceId, RequestKey
from tests.sim.indirect import INDIRECT
from tests.sim.islands import COST, finish, limits, play, requests, small_island, with_slow_copies

NUM_REQUESTS = 40
LIMIT_S = 600.0
SLOW = with_slow_copies(COST, 200.0)
# Pulls are done long before saves are.
_SAVE = replace(COST.channels.save, bytes_per_s=COST.channels.save.bytes_per_s / 1000)
SLOW_SAVES = replace(SLOW, channels=replace(SLOW.channels, save=_SAVE))
ROOMY: dict[str, Any] = {"prefill": limits(num_blocks=256), "decode": limits(num_blocks=256)}


def with_best_effort() -> list[Any]:
    """Every other request."""
    asked = requests(NUM_REQUESTS, every_s=0.25)
    return [replace(each, tier="be" if each.key % 2 else "rt") for each in asked]


def core(island: SimIsland) -> Router:
    assert island.router.core
    return island.router.core


def num_handed_over(island: SimIsland) -> int:
    return sum(core(island).state.counters.of(each.instance_id).num_handed_over for each in island.prefills)


def num_bytes(island: SimIsland, what: str) -> int:
    stats = (core(island).state.counters.of(each.instance_id) for each in island.instances)
    return sum(moved.num_bytes for each in stats for moved in each.moved if moved.what == what)


def gaps_s(island: SimIsland) -> list[float]:
    """From the first to the second token of real time."""
    real_time = [each for each in island.streams if each.request.tier == "rt"]
    return [each.times_s[1] - each.times_s[0] for each in real_time if len(each.tokens) > 1]


def test_the_second_token_comes_sooner_and_the_pool_is_read_less() -> None:
    ways = {
        policy: play(
            small_island(policy, "ipc", cost=with_slow_copies(COST, 20.0), **ROOMY),
            with_best_effort(),
            limit_s=LIMIT_S,
        )
        for policy in ("aligned", INDIRECT)
    }
    direct, indirect = ways.values()
    assert num_handed_over(direct) == NUM_REQUESTS // 2 and not num_handed_over(indirect)
    assert median(gaps_s(direct)) < 0.7 * median(gaps_s(indirect))
    # Best effort is all that comes from the pool; everything goes there.
    assert num_bytes(direct, "load") < 0.7 * num_bytes(indirect, "load")
    assert num_bytes(direct, "save") == num_bytes(indirect, "save")
    assert num_bytes(direct, "pull") == num_bytes(indirect, "pull")


@pytest.mark.parametrize("policy", ["aligned", "fcfs", "priority", "accelgen"])
def test_without_best_effort_it_is_the_way_as_long_as_there_is_room(policy: str) -> None:
    island = play(small_island(policy, "ipc", **ROOMY), requests(NUM_REQUESTS, every_s=0.25), limit_s=LIMIT_S)
    assert num_handed_over(island) == NUM_REQUESTS
    assert not num_bytes(island, "load")


def test_best_effort_goes_by_way_of_the_pool() -> None:
    asked = [replace(each, tier="be") for each in requests(NUM_REQUESTS)]
    assert not num_handed_over(play(small_island(link="ipc", **ROOMY), asked, limit_s=LIMIT_S))


def test_prompts_are_not_kept_from_their_blocks() -> None:
    """However slowly decode instances pull: no more is held than may be staged."""
    island = small_island(link="ipc", cost=SLOW, num_decode=2)
    most = 0

    def observe(*_: object) -> None:
        nonlocal most
        for prefill in island.prefills:
            if prefill.is_up:
                worker = prefill.worker
                assert isinstance(worker, PrefillWorker)
                held = worker.schedule.prompts.num_held_blocks + worker.schedule.stages.num_blocks
                assert held <= worker.limits.num_staging_blocks
                most = max(most, held)

    island.router.observers.append(observe)
    play(island, requests(NUM_REQUESTS, every_s=0.02), limit_s=LIMIT_S)
    assert most > 8 and num_handed_over(island)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


class FailingCopies(NoFaults):
    """Some of a kind."""

    def __init__(self, what: str, share: float) -> None:
        self._what = what
        self._share = share
        self._num = 0
        self.num_failed = 0

    def copy_share(self, what: str, key: RequestKey) -> float | None:
        self._num += what == self._what
        if what != self._what or self._num % 3:
            return None
        self.num_failed += 1
        return self._share


@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("what", ["pull", "save"])
def test_copies_that_fail_cost_no_token(what: str, share: float) -> None:
    island = small_island(link="ipc", cost=SLOW)
    faults = island.world.faults = FailingCopies(what, share)
    play(island, with_best_effort(), limit_s=LIMIT_S)
    assert faults.num_failed > 3 and num_handed_over(island) > 3


def is_pulled(state: RequestState) -> bool:
    return state.phase is Phase.OFFERED


def is_running(state: RequestState) -> bool:
    return state.phase is Phase.RUNNING


@pytest.mark.drawn(one_in=4)
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "kvpool-0", "router"])
@pytest.mark.parametrize("when", [is_pulled, is_running], ids=["while it is pulled", "while it runs"])
def test_a_death_before_it_is_saved_costs_no_token(victim: str, when: Callable[[RequestState], bool]) -> None:
    island = small_island(link="ipc", cost=SLOW_SAVES)
    asked = with_best_effort()
    island.submit(asked)
    island.start()

    def is_far() -> bool:
        return any(state.saving_at and when(state) for state in core(island).state.requests)

    for _ in range(3):
        assert island.world.clock.run_while(lambda: island.router.core is None or not is_far(), 100.0)
        name = InstanceId(victim)
        process: Any = island.router if victim == "router" else island.world.processes[name]
        process.kill()
        island.run(0.5)
        process.start()
    finish(island, NUM_REQUESTS, limit_s=LIMIT_S)
