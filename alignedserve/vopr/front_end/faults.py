"""The faults of a whole system: at any time, or right after some message or store call."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from alignedserve.types import InstanceId
from alignedserve.vopr.faults import MOMENTS, When, aimed_faults, failing_copies, faults_of, make, slow_copies
from alignedserve.vopr.history import (
    ROUTER,
    Action,
    Disconnect,
    Disturb,
    Hang,
    Jump,
    Kill,
    Late,
    LoseStore,
    Regroup,
    Stop,
    StoreForgetful,
    StoreSlow,
)
from alignedserve.vopr.plan import Plan

# The store calls after which faults happen: those that change the state that others continue from. `replace_job` stands
# twice: it changes most of that state. A seed means the same history only as long as there are as many.
STORE_MOMENTS = (
    *("put_chunk", "commit_file", "add_job", "take", "renew", "begin_lines", "put_result", "replace_job"),
    *("replace_job", "release", "delete_file"),
)
_DOWN_S = (0.0, 0.0, 0.0004, 0.5, 5.0, 40.0)


def make_front_faults(random: Random, plan: Plan) -> Iterator[Action]:
    yield from faults_of(random, plan, _KINDS, (*MOMENTS, *STORE_MOMENTS))
    if plan.aims:
        yield from aimed_faults(Random(f"{' '.join(plan.aims)} in {plan.seed}"), plan)


def _gateway(random: Random, plan: Plan) -> InstanceId:
    return random.choice(plan.ids_of("gateway"))


def _of_island(random: Random, plan: Plan) -> InstanceId:
    """Returns the router of an island as often as all its other processes together."""
    name = random.choice(plan.ids_of("kvpool") + plan.instances)
    return _in_some(random, plan, random.choice([ROUTER, name]))


def _in_some(random: Random, plan: Plan, name: InstanceId) -> InstanceId:
    assert plan.front
    return InstanceId(f"island-{random.randrange(plan.front.num_islands)}/{name}")


def _any(random: Random, plan: Plan) -> InstanceId:
    return random.choice([_gateway, _of_island])(random, plan)


def _linked(random: Random, plan: Plan) -> InstanceId:
    """Returns a process that connects to routers."""
    of_island = _in_some(random, plan, random.choice(plan.ids_of("kvpool") + plan.instances))
    return random.choice([_gateway(random, plan), of_island])


def _at_store(random: Random, plan: Plan) -> InstanceId:
    return random.choice([InstanceId(""), _gateway(random, plan)])


def _death(random: Random, plan: Plan, when: When) -> Action:
    victims = {_any(random, plan) for _ in range(random.choice([1, 1, 1, 2, 4]))}
    downs = {each: random.choice(_DOWN_S) for each in sorted(victims)}
    return make(Kill, when, processes=downs, loses_segment=random.random() < 0.3)


def _gateway_death(random: Random, plan: Plan, when: When) -> Action:
    return make(Kill, when, processes={_gateway(random, plan): random.choice(_DOWN_S)})


def _router_death(random: Random, plan: Plan, when: When) -> Action:
    return make(Kill, when, processes={_in_some(random, plan, ROUTER): random.choice(_DOWN_S)})


def _stop(random: Random, plan: Plan, when: When) -> Action:
    return make(Stop, when, process=_gateway(random, plan), seconds=random.choice(_DOWN_S))


def _hang(random: Random, plan: Plan, when: When) -> Action:
    """Hangs a process, for less or more than the duration of leases and the router's patience."""
    return make(Hang, when, process=_any(random, plan), seconds=random.choice([0.01, 1.0, 4.0, 7.0, 20.0]))


def _cut(random: Random, plan: Plan, when: When) -> Action:
    return make(Disconnect, when, process=_linked(random, plan))


def _regrouping(random: Random, plan: Plan, when: When) -> Action:
    assert plan.front
    num_islands = plan.front.num_islands
    islands = random.sample(range(num_islands), random.randint(1, num_islands))
    return make(Regroup, when, islands=sorted(islands), seconds=random.choice([0.0, 0.0004, 0.5, 10.0]))


def _disturbance(random: Random, plan: Plan, when: When) -> Action:
    return make(
        Disturb,
        when,
        process=_linked(random, plan),
        number=random.randrange(3),
        how=random.choice(["stall", "stall", "process is gone", "router is gone", "vanish"]),
        seconds=random.choice([0.01, 1.0, 8.0, 20.0]),
    )


def _late(random: Random, plan: Plan, when: When) -> Action:
    return make(
        Late,
        when,
        process=_linked(random, plan),
        is_up=random.random() < 0.5,
        latency_s=random.choice([0.05, 1.0]),
        seconds=random.choice([1.0, 20.0]),
    )


def _jump(random: Random, plan: Plan, when: When) -> Action:
    return make(Jump, when, process=_gateway(random, plan), seconds=random.choice([-600.0, -5.0, 5.0, 600.0]))


def _store_away(random: Random, plan: Plan, when: When) -> Action:
    return make(
        LoseStore, when, process=_at_store(random, plan), seconds=random.choice([0.0005, 0.1, 3.0, 8.0, 20.0])
    )


def _store_slow(random: Random, plan: Plan, when: When) -> Action:
    latency_s = random.choice([0.1, 1.5])
    return make(
        StoreSlow,
        when,
        process=_at_store(random, plan),
        latency_s=latency_s,
        seconds=random.choice([1.0, 10.0]),
    )


def _store_forgetful(random: Random, plan: Plan, when: When) -> Action:
    rate = random.choice([0.3, 0.9])
    return make(
        StoreForgetful,
        when,
        process=_at_store(random, plan),
        rate=rate,
        seconds=random.choice([0.1, 3.0, 10.0]),
    )


_KINDS = (
    *(_death, _gateway_death, _router_death, _stop, _regrouping, _hang, _cut, _disturbance, _late, _jump),
    *(failing_copies, slow_copies, _store_away, _store_slow, _store_forgetful),
)
