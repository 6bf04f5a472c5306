"""Where a run was when something failed: which transitions had just happened, and what died, hung or was cut off.

A place is `DecodeReport.evicted:router dies`: the router died within milliseconds of hearing of an eviction, with what
it sent for that under way. The process of a transition that is neither the router nor the pool is its peer. New seeds
are aimed at the transitions and victims that were visited least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from random import Random

from alignedserve.sim.clock import Clock
from alignedserve.types import InstanceId
from alignedserve.vopr.history import PEER, ROUTER, Action, Cut, Disturb, Hang, Kill, Stop
from alignedserve.vopr.plan import Plan
from alignedserve.vopr.transitions import OF_POOL, TRANSITIONS, Seen, transitions_of

# The seconds for which a transition counts as under way after the router has heard or sent its message.
NEAR_S = 0.01
VICTIMS = ("router", "kvpool", PEER)
FATES = ("dies", "hangs", "is cut off")
ALL_AIMS = [
    f"{transition}:{victim}"
    for transition in TRANSITIONS
    for victim in VICTIMS
    if (victim, transition in OF_POOL) != (PEER, True)
]
# Connections are other processes': a router is not cut off.
PLACES = [
    f"{aim} {fate}"
    for aim in ALL_AIMS
    for fate in FATES
    if not (aim.endswith(":router") and fate == "is cut off")
]
_ALL_PLACES = frozenset(PLACES)


class Visits:
    """Counts the places of a run."""

    def __init__(self, clock: Clock, is_up: Callable[[InstanceId], bool]) -> None:
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._is_up = is_up
        # For each island, which is "" where there is one only: when each transition was last seen.
        self._seen: dict[str, dict[Seen, float]] = {}

    def saw(self, island: str, seen: Iterable[Seen]) -> None:
        """`island`: how the names of its processes begin."""
        times = self._seen.setdefault(island, {})
        now = self._clock.now
        for each in seen:
            times[each] = now

    def strikes(self, action: Action) -> None:
        """The action is about to happen."""
        for process, fate in _struck(action):
            if self._is_up(process):
                self._count(process, fate)

    def _count(self, process: InstanceId, fate: str) -> None:
        after_s = self._clock.now - NEAR_S
        for island, times in self._seen.items():
            name = process.removeprefix(island)
            if "/" in name:
                continue
            for (transition, peer), time_s in times.items():
                if time_s >= after_s and (victim := _victim(name, peer)):
                    place = f"{transition}:{victim} {fate}"
                    if place in _ALL_PLACES:
                        self.counts[place] += 1


def _victim(name: str, peer: InstanceId) -> str | None:
    """Returns what the process is in a transition with this peer; None: it has no part in it."""
    if name == ROUTER:
        return "router"
    if name.startswith("kvpool"):
        return "kvpool"
    return PEER if name == peer else None


def _struck(action: Action) -> Iterator[tuple[InstanceId, str]]:
    match action:
        case Kill(processes=downs):
            yield from ((each, "dies") for each in downs)
        case Stop(process=process):
            yield process, "dies"
        case Hang(process=process):
            yield process, "hangs"
        case Cut(process=process) | Disturb(process=process):
            yield process, "is cut off"
        case _:
            pass


class Aims:
    """Draws what new seeds are aimed at, the more often the less it was visited, and tried, before."""

    # The share of the seeds that are aimed at nothing.
    UNAIMED = 0.25
    # The number of aims of each other seed. A few faults show what an aim has to show in a plan, and plans differ.
    NUM_A_SEED = 3

    def __init__(self, random: Random) -> None:
        self._random = random
        # For each aim: how many of its places were visited, and how many seeds have had it.
        self._counts: Counter[str] = Counter()

    def draw(self, plan: Plan) -> tuple[str, ...]:
        """Returns different aims that a system of this plan may have, or none."""
        if self._random.random() < self.UNAIMED:
            return ()
        possible, drawn = aims_of(plan), list[str]()
        while len(drawn) < self.NUM_A_SEED:
            weights = [(1 + self._counts[aim]) ** -2.0 for aim in possible]
            drawn += self._random.choices(possible, weights)
            possible.remove(drawn[-1])
        self._counts.update(drawn)
        return tuple(drawn)

    def visited(self, counts: Counter[str]) -> None:
        for place in counts:
            self._counts[place.split(" ")[0]] += 1


def aims_of(plan: Plan) -> list[str]:
    possible = transitions_of(plan)
    return [aim for aim in ALL_AIMS if aim.split(":")[0] in possible]
