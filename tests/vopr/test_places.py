"""What is aimed at a transition falls there, and a run tells which places it visited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from alignedserve.protocol.messages import DecodeReport, Evict, Hello, InstanceLimits, Reserved
from alignedserve.router.events import Closed, Connected, Event, Received, Send
from alignedserve.sim.clock import Clock
from alignedserve.types import Epoch, InstanceId, RequestKey
from alignedserve.vopr.faults import NEAR_DELAYS_S, aimed_faults
from alignedserve.vopr.history import PEER, ROUTER, AnyAction, Arrive, Disconnect, Hang, History, Kill
from alignedserve.vopr.island_run import IslandRun
from alignedserve.vopr.outcome import RunOutcome
from alignedserve.vopr.places import ALL_AIMS, NEAR_S, PLACES, Visits
from alignedserve.vopr.runs.run import history_of, log_hash, run
from alignedserve.vopr.tally import RunTally
from alignedserve.vopr.transitions import seen

DECODE, POOL, GATEWAY = InstanceId("decode-0"), InstanceId("kvpool-0"), InstanceId("gateway-0")
ONE, TWO = RequestKey(1), RequestKey(2)
EVICTED = "DecodeReport.evicted:router"


def report(**lists: object) -> DecodeReport:
    counts = {"num_free_blocks": 0, "num_running": 0, "max_length": 0, "sum_lengths": 0}
    empty: dict[str, object] = {"news": [], "admitted": [], "wants_evicted": [], "evicted": []}
    return DecodeReport(**(empty | counts | lists))  # type: ignore[arg-type]


def hello(instance_id: InstanceId) -> Hello:
    return Hello("decode", instance_id, Epoch(1), 0, {}, InstanceLimits())


@pytest.mark.parametrize(
    ("event", "sends", "wanted"),
    [
        (
            Received(DECODE, report(evicted=[(ONE, 7)], admitted=[TWO])),
            [Send(DECODE, Evict(TWO, [], 0))],
            [
                ("DecodeReport", DECODE),
                ("DecodeReport.admitted", DECODE),
                ("DecodeReport.evicted", DECODE),
                ("Evict", DECODE),
            ],
        ),
        (Received(POOL, Reserved(ONE, [])), [], [("Reserved", POOL)]),
        (
            Received(POOL, Reserved(ONE, [], dropped=[TWO])),
            [],
            [("Reserved", POOL), ("Reserved.dropped", POOL)],
        ),
        (Connected(hello(DECODE)), [], [("Connected", DECODE)]),
        (Closed(GATEWAY, Epoch(1)), [], [("Closed", GATEWAY)]),
    ],
)
def test_a_step_is_about_its_messages(
    event: Event, sends: Sequence[Send], wanted: list[tuple[str, InstanceId]]
) -> None:
    assert list(seen(event, sends)) == wanted


# ---- places ----------------------------------------------------------------------------------------------------------


def visits_of(*actions: AnyAction, after_s: float = 0.0, is_up: bool = True) -> Counter[str]:
    """Returns the places of these, some time after an eviction at one island of two."""
    clock = Clock()
    visits = Visits(clock, lambda process: is_up)
    visits.saw("island-0/", [("DecodeReport.evicted", DECODE)])
    clock.run_until(after_s)
    for action in actions:
        visits.strikes(action)
    return visits.counts


def killed(process: str) -> Kill:
    return Kill(at_s=0.0, processes={InstanceId(process): 0.0})


def test_a_place_is_what_was_under_way_and_what_failed() -> None:
    process = InstanceId("island-0/decode-0")
    counts = visits_of(
        killed("island-0/router"),
        killed("island-0/kvpool-0"),
        Hang(at_s=0.0, process=process, seconds=1.0),
        Disconnect(at_s=0.0, process=process),
    )
    evicted = "DecodeReport.evicted"
    assert counts == dict.fromkeys(
        (
            f"{evicted}:router dies",
            f"{evicted}:kvpool dies",
            f"{evicted}:peer hangs",
            f"{evicted}:peer is cut off",
        ),
        1,
    )
    assert set(counts) <= set(PLACES)


@pytest.mark.parametrize("process", ["island-1/router", "island-0/decode-1", "gateway-0"])
def test_what_has_no_part_in_it_is_at_no_place(process: str) -> None:
    assert not visits_of(killed(process))


def test_what_is_long_over_is_no_place_nor_is_the_death_of_what_is_down() -> None:
    death = killed("island-0/router")
    assert visits_of(death, after_s=0.9 * NEAR_S)
    assert not visits_of(death, after_s=1.1 * NEAR_S)
    assert not visits_of(death, is_up=False)


def test_a_tally_counts_the_seeds_that_visited_a_place() -> None:
    tally = RunTally()
    often, seldom = f"{EVICTED} dies", "Evict:peer hangs"
    for visited in ({often: 7, seldom: 1}, {often: 2}, {}):
        tally.add(RunOutcome(None, 1.0, 0, 0, 0, visited=Counter(visited)))
    lines = list(tally.lines(1.0))
    assert any(line.endswith(f"visited: 2 of {len(PLACES)}") for line in lines)
    assert f"by the fewest seeds: {seldom} 1, {often} 2" in lines
    assert lines[-1].startswith("by none: ") and lines[-1].endswith(", ...")


# ---- aims ------------------------------------------------------------------------------------------------------------


def aimed(aim: str, seed: int = 1001) -> History:
    return history_of(seed, systems=("island",), aims=[aim])


def without_chance(history: History) -> History:
    """Arrivals, and the deaths at what it is aimed at, without those that go astray."""
    plan, (aim,) = history.plan, history.plan.aims
    transition, victim = aim.split(":")
    victims = {"kvpool-0" if victim == "kvpool" else victim}
    kept: list[AnyAction] = [action for action in history.actions if isinstance(action, Arrive)]
    kept += [
        action
        for action in aimed_faults(Random(1), plan)
        if isinstance(action, Kill) and action.after == transition and action.processes.keys() == victims
    ]
    return History(plan, sorted(kept, key=lambda action: action.at_s))


@pytest.mark.slow
@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize("aim", [EVICTED, "Evict:peer", "Commit:kvpool"])
def test_an_aimed_death_falls_where_it_was_aimed_at(aim: str) -> None:
    """Every death comes within milliseconds of the transition, and is that of its victim."""
    transition, victim = aim.split(":")
    history = without_chance(aimed(aim))
    island_run, times = IslandRun(history), list[tuple[float, InstanceId]]()
    clock = island_run.island.world.clock

    def note(now: float, event: Event, sends: list[Send]) -> None:
        times.extend((clock.now, peer) for name, peer in seen(event, sends) if name == transition)

    island_run.island.router.observers.insert(0, note)
    deaths = list[tuple[float, InstanceId]]()
    kill = island_run._launcher.kill

    def killing(action: Kill) -> None:
        deaths.extend((clock.now, process) for process in action.processes)
        kill(action)

    island_run._launcher.kill = killing  # type: ignore[method-assign]
    outcome = island_run()
    assert outcome.failure is None and deaths
    names = {"router": ROUTER, "kvpool": POOL}
    for death_s, process in deaths:
        assert any(
            death_s - max(NEAR_DELAYS_S) <= time_s <= death_s and process == names.get(victim, peer)
            for time_s, peer in times
        )
    assert outcome.visited[f"{aim} dies"]


@pytest.mark.slow
def test_what_is_aimed_is_the_same_each_time() -> None:
    assert log_hash(aimed(EVICTED)) == log_hash(aimed(EVICTED)) != log_hash(aimed("Evict:peer"))


@pytest.mark.slow
def test_a_router_of_a_whole_system_is_aimed_at() -> None:
    history = history_of(3, systems=("whole",), aims=["Submit:router"])
    outcome = run(history)
    assert outcome.failure is None
    assert outcome.visited["Submit:router dies"]


def test_an_aim_that_is_none_is_refused() -> None:
    assert all(history_of(1, aims=[aim]).plan.aims == (aim,) for aim in ALL_AIMS)
    with pytest.raises(ValueError, match="aim='Evict': must be one of Reserve:router, "):
        history_of(1, aims=["Evict"])


def test_the_peer_of_an_action_is_that_of_what_it_waited_for() -> None:
    history = aimed("Evict:peer")
    assert any(isinstance(action, Kill) and PEER in action.processes for action in history.actions)
