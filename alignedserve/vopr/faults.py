"""The faults of a plan: at any time, right after some transition, or where the plan's aims are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

from alignedserve.types import InstanceId
from alignedserve.vopr.history import (
    PEER,
    ROUTER,
    Action,
    Disconnect,
    Drift,
    FailingCopies,
    FlipBit,
    Hang,
    Jump,
    Kill,
    Late,
    SlowCopies,
)
from alignedserve.vopr.places import aims_of
from alignedserve.vopr.plan import OF_LEAVING, Plan, is_about

# The transitions after which faults happen: those that change which process holds what.
MOMENTS = (
    *("Submit", "Abort", "Reserve", "Reserved", "Commit", "MakeSpare", "Release", "FormBatch", "Candidates"),
    *("Prefill", "Stage", "Offer", "Evict", "PrefillReport", "DecodeReport", "Gone", "Failed", "Connected"),
    *("DecodeReport.admitted", "DecodeReport.evicted", "PrefillReport.saved", "PrefillReport.held"),
    *("Offer.source", "TakeRole", "Submit.delivered"),
)
# Seconds after such a message: before it is sent on, while it is on its way, and long after it has arrived.
DELAYS_S = (0.0, 0.00015, 0.001, 0.3, 3.0)
# The same for aimed faults: while the message or its consequences are on their way.
NEAR_DELAYS_S = (0.0, 0.00015, 0.0005, 0.001, 0.003, 0.008)
# Mean seconds between two aimed faults. After that time most of the system runs again.
AIMED_GAPS_S = (0.4, 1.0)
# The share of aimed faults that strike elsewhere: in a tight plan where requests leave instances, which happens all the
# time; in others anywhere.
ASTRAY = 0.4
# The transitions at which the KV of a decoding request may still be on its way from its prompt to the pool.
OF_SAVING = ("Offer.source", "DecodeReport.wants_evicted")
# The share of the runs in which bits of the pool flip, and how many flip on average.
FLIPPING_SHARE = 0.33
NUM_FLIPS = 30
# The kinds of copies.
COPIES = ("load", "save", "pull")

# When a fault happens: the common fields of all actions.
When = dict[str, object]
Kind = Callable[[Random, Plan, When], Action]


def make_faults(random: Random, plan: Plan) -> Iterator[Action]:
    yield from faults_of(random, plan, _KINDS, MOMENTS)
    if plan.aims:
        yield from aimed_faults(Random(f"{' '.join(plan.aims)} in {plan.seed}"), plan)
    yield from flips(Random(f"flips of {plan.seed}"), plan)


def faults_of(random: Random, plan: Plan, kinds: Sequence[Kind], moments: Sequence[str]) -> Iterator[Action]:
    """Yields faults; none at all in one run of ten. The other runs have only some kinds, so that each kind also occurs
    without the rest."""
    if random.random() < 0.1:
        return
    kinds = [kind for kind in kinds if random.random() < 0.45]
    mean_gap_s = random.choice([0.5, 2.0, 5.0] if plan.is_short else [5.0, 20.0, 60.0])
    at_s = random.expovariate(1.0 / mean_gap_s)
    while kinds and at_s < plan.duration_s:
        yield random.choice(kinds)(random, plan, _moment(random, at_s, moments))
        at_s += random.expovariate(1.0 / mean_gap_s)


def aimed_faults(random: Random, plan: Plan) -> Iterator[Action]:
    """Yields faults at the plan's aims. Most of the struck processes die, and return soon."""
    mean_gap_s = random.choice(AIMED_GAPS_S)
    elsewhere = [aim for aim in aims_of(plan) if not plan.is_tight or is_about([aim], *OF_LEAVING)]
    at_s = random.expovariate(1.0 / mean_gap_s)
    while at_s < plan.duration_s:
        aim = random.choice(elsewhere if random.random() < ASTRAY else plan.aims)
        transition, victim = aim.split(":")
        when = {"at_s": at_s, "after": transition, "delay_s": random.choice(NEAR_DELAYS_S)}
        process = InstanceId("kvpool-0" if victim == "kvpool" else victim)
        kinds = [*_AIMED, *((_aimed_slow_saves,) if transition in OF_SAVING else ())]
        kind = random.choices(kinds, _AIMED_WEIGHTS[: len(kinds)])[0]
        yield kind(random, process, when)
        if kind is _aimed_late and process == ROUTER:
            yield _aimed_death(random, process, when)
        at_s += random.expovariate(1.0 / mean_gap_s)


def flips(random: Random, plan: Plan) -> Iterator[Action]:
    """Yields bits that flip in the pool, in one run of three."""
    if random.random() >= FLIPPING_SHARE:
        return
    at_s = 0.0
    while (at_s := at_s + random.expovariate(NUM_FLIPS / plan.duration_s)) < plan.duration_s:
        yield make(FlipBit, _moment(random, at_s, MOMENTS), number=random.randrange(1 << 30))


def _moment(random: Random, at_s: float, moments: Sequence[str]) -> When:
    if random.random() < 0.4:
        return {"at_s": at_s}
    return {"at_s": at_s, "after": random.choice(moments), "delay_s": random.choice(DELAYS_S)}


def _any(random: Random, plan: Plan) -> InstanceId:
    return random.choice([ROUTER, ROUTER, *plan.processes])


def down_s(random: Random, plan: Plan) -> float:
    """Returns how long a process stays down. If it returns at once, the notice of its death may still be on its way."""
    return random.choice(
        [0.0, 0.0, 0.0004, 0.05, 0.5, 2.0] if plan.is_short else [0.0, 0.0, 0.0004, 0.5, 5.0, 40.0]
    )


def _death(random: Random, plan: Plan, when: When) -> Action:
    """Kills one process or several."""
    victims = {_any(random, plan) for _ in range(random.choice([1, 1, 1, 2, 4]))}
    downs = {each: down_s(random, plan) for each in sorted(victims)}
    return make(Kill, when, processes=downs, loses_segment=random.random() < 0.3)


def _router_death(random: Random, plan: Plan, when: When) -> Action:
    return make(Kill, when, processes={ROUTER: min(down_s(random, plan), 5.0)})


def _hang(random: Random, plan: Plan, when: When) -> Action:
    """Hangs a process, for less or more than the router's patience."""
    return make(Hang, when, process=_any(random, plan), seconds=random.choice([0.01, 1.0, 5.0, 12.0, 40.0]))


def _cut(random: Random, plan: Plan, when: When) -> Action:
    return make(Disconnect, when, process=random.choice(plan.processes))


def _late(random: Random, plan: Plan, when: When) -> Action:
    return make(
        Late,
        when,
        process=random.choice(plan.processes),
        is_up=random.random() < 0.5,
        latency_s=random.choice([0.05, 1.0, 4.0]),
        seconds=random.choice([1.0, 20.0]),
    )


def failing_copies(random: Random, plan: Plan, when: When) -> Action:
    return make(
        FailingCopies,
        when,
        rate=random.choice([0.1, 0.5, 1.0]),
        seconds=random.choice([1.0, 20.0]),
        what=random.choice(["", "", *COPIES]),
    )


def slow_copies(random: Random, plan: Plan, when: When) -> Action:
    return make(
        SlowCopies,
        when,
        slowdown=random.choice([5.0, 50.0]),
        seconds=random.choice([5.0, 30.0]),
        what=random.choice(["", "", *COPIES]),
    )


def _jump(random: Random, plan: Plan, when: When) -> Action:
    return make(Jump, when, process=_any(random, plan), seconds=random.choice([0.5, 30.0, 1000.0]))


def _drift(random: Random, plan: Plan, when: When) -> Action:
    return make(Drift, when, process=_any(random, plan), rate=random.choice([0.5, 0.999, 1.001, 1.5]))


def make(kind: Callable[..., Action], when: When, **fields: object) -> Action:
    return kind(**when, **fields)


_KINDS = (_death, _router_death, _hang, _cut, _late, failing_copies, slow_copies, _jump, _drift)


def _aimed_death(random: Random, process: InstanceId, when: When) -> Action:
    downs = {process: random.choice([0.0, 0.0004, 0.01, 0.1, 0.3])}
    return make(Kill, when, processes=downs, loses_segment=random.random() < 0.1)


def _aimed_hang(random: Random, process: InstanceId, when: When) -> Action:
    return make(Hang, when, process=process, seconds=random.choice([0.01, 0.1, 1.0]))


def _aimed_cut(random: Random, process: InstanceId, when: When) -> Action:
    """Cuts a connection. The router has none of its own, so its peer's is cut instead."""
    return make(Disconnect, when, process=PEER if process == ROUTER else process)


def _aimed_late(random: Random, process: InstanceId, when: When) -> Action:
    """Makes messages of the process late from now on. If the router is to be struck, which then dies, messages to its
    peer are late. Its orders from before its death are then still on their way when another router is up."""
    late = PEER if process == ROUTER else process
    is_up = process != ROUTER and random.random() < 0.5
    latency_s = random.choice([0.05, 1.0])
    return make(Late, when | {"delay_s": 0.0}, process=late, is_up=is_up, latency_s=latency_s, seconds=1.0)


def _aimed_slow_saves(random: Random, process: InstanceId, when: When) -> Action:
    """Slows saves, so that a prompt is still being saved when its decode instance wants it to leave."""
    return make(SlowCopies, when, slowdown=50.0, seconds=random.choice([0.5, 2.0]), what="save")


_AIMED = (_aimed_death, _aimed_hang, _aimed_cut, _aimed_late)
_AIMED_WEIGHTS = (0.65, 0.15, 0.1, 0.1, 0.3)
