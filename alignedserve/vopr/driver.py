"""Executes the actions of a history, each at its time or after the transition that it waits for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

from msgspec.structs import replace

from alignedserve.router.events import Event, Observer, Send
from alignedserve.sim.clock import Clock
from alignedserve.types import InstanceId
from alignedserve.vopr.history import (
    PEER,
    Action,
    Arrive,
    Ask,
    Disconnect,
    Hang,
    Kill,
    Late,
    SubmitJob,
    kind_of,
)
from alignedserve.vopr.launcher import Launcher
from alignedserve.vopr.places import Visits
from alignedserve.vopr.transitions import Seen, seen

# Actions of clients, which also happen when everything is well.
_ASKING = (Arrive, Ask, SubmitJob)


class Driver(ABC):
    def __init__(self, clock: Clock, launcher: Launcher) -> None:
        self._clock = clock
        self._launcher = launcher
        # Actions that wait for a transition or a store call, by its name.
        self._waiting: defaultdict[str, list[Action]] = defaultdict(list)
        self.visits = Visits(clock, lambda process: launcher.processes[process].is_up)
        self._is_calm = False
        # How many actions of each kind have happened.
        self.happened: Counter[str] = Counter()

    @abstractmethod
    def act(self, action: Action) -> None:
        """Executes the action now."""

    def schedule(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._clock.at(action.at_s, partial(self._due, action))

    def calm(self) -> None:
        """Ends all faults. Open requests stay."""
        self._is_calm = True
        self._waiting.clear()

    def observer(self, island: str = "") -> Observer:
        """Returns an observer of a router. `island`: the prefix of its processes' names."""

        def observe(now: float, event: Event, sends: list[Send]) -> None:
            happened = list(seen(event, sends))
            self.visits.saw(island, happened)
            if self._waiting:
                self.look_for(happened, island)

        return observe

    def look_for(self, happened: Iterable[Seen], island: str = "") -> None:
        for name, peer in happened:
            for action in self._waiting.pop(name, ()):
                self._clock.after(action.delay_s, partial(self._do, _at(action, island, peer)))

    def _due(self, action: Action) -> None:
        if self.is_put_off(action):
            return
        if action.after:
            self._waiting[action.after].append(action)
        else:
            self._do(action)

    def is_put_off(self, action: Action) -> bool:
        """Returns whether the action waits for something other than a message. The subclass then executes it."""
        return False

    def _do(self, action: Action) -> None:
        if self._is_calm and not isinstance(action, _ASKING):
            return
        self.visits.strikes(action)
        self.happened[kind_of(action)] += 1
        self.act(action)


def _at(action: Action, island: str, peer: InstanceId) -> Action:
    """Returns the action with the names of the island in which its transition has happened."""

    def named(process: InstanceId) -> InstanceId:
        name = peer if process == PEER else process
        is_whole = "/" in name or name.startswith("gateway")
        return name if is_whole else InstanceId(f"{island}{name}")

    match action:
        case Kill(processes=downs):
            return replace(action, processes={named(each): down_s for each, down_s in downs.items()})
        case Hang(process=process) | Disconnect(process=process) | Late(process=process):
            return replace(action, process=named(process))
        case _:
            return action
