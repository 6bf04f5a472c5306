"""Places: which transitions had just happened in a run when something failed, and what died, hung or was cut off.

The place `DecodeReport.evicted:router dies` means that the router died within milliseconds of receiving an eviction,
with the messages that it sent for that on their way. The peer of a transition is its process that is neither the router
nor the pool. New seeds are aimed at the least visited transitions and victims.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from random import Random

from alignedserve.sim.clock import Clock
from alignedserve.types import InstanceId
from alignedserve.vopr.history import PEER, ROUTER, Action, Disconnect, Disturb, Hang, Kill, Stop
from alignedserve.vopr.plan import Plan
from alignedserve.vopr.transitions import OF_POOL, TRANSITIONS, Seen, transitions_of

# Seconds for which a transition counts as under way after the router has received or sent its message.
NEAR_S = 0.01
VICTIMS = ("router", "kvpool", PEER)
FATES = ("dies", "hangs", "is cut off")
ALL_AIMS = [
    f"{transition}:{victim}"
    for transition in TRANSITIONS
    for victim in VICTIMS
    if (victim, transition in OF_POOL) != (PEER, True)
]
# A router is never cut off: connections belong to the other processes.
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
        # For each island ("" if there is only one): when each transition was last seen.
        self._seen: dict[str, dict[Seen, float]] = {}

    def saw(self, island: str, seen: Iterable[Seen]) -> None:
        """Records transitions. `island`: the prefix of its processes' names."""
        times = self._seen.setdefault(island, {})
        now = self._clock.now
        for each in seen:
            times[each] = now

    def strikes(self, action: Action) -> None:
        """Counts the places of an action that is about to happen."""
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
    """Returns the process's part in a transition with this peer; None: it has none."""
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
        case Disconnect(process=process) | Disturb(process=process):
            yield process, "is cut off"
        case _:
            pass


class Aims:
    """Draws the aims of new seeds. Aims that were visited or tried less are drawn more often."""

    # The share of the seeds without an aim.
    UNAIMED = 0.25
    # The number of aims of each other seed. A few faults suffice per aim and plan, and plans differ.
    NUM_A_SEED = 3

    def __init__(self, random: Random) -> None:
        self._random = random
        # For each aim: the number of visits to its places, and of seeds that have had it.
        self._counts: Counter[str] = Counter()

    def draw(self, plan: Plan) -> tuple[str, ...]:
        """Returns different aims that a system with this plan may have, or none."""
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
