"""Makes the actions of a history happen, each at its time or after the message that it waits for. It observes the
router."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial

from alignedserve.router.events import Event, Received, Send
from alignedserve.sim.island import Island
from alignedserve.types import RequestKey
from alignedserve.vopr.clients import Clients
from alignedserve.vopr.conditions import Conditions
from alignedserve.vopr.history import (
    Action,
    Arrive,
    Cut,
    Drift,
    FailingCopies,
    Hang,
    Jump,
    Kill,
    Late,
    Leave,
    SlowCopies,
    kind_of,
)
from alignedserve.vopr.launcher import Launcher


class Driver:
    def __init__(self, island: Island, clients: Clients, launcher: Launcher, conditions: Conditions) -> None:
        self._island = island
        self._clock = island.world.clock
        self._clients = clients
        self._launcher = launcher
        self._conditions = conditions
        # What waits for a message, by the message's kind.
        self._waiting: defaultdict[str, list[Action]] = defaultdict(list)
        # The phase in which each of these requests is to be left, and how many seconds after it was entered.
        self._leaving: dict[RequestKey, Leave] = {}
        self._is_calm = False
        # How many actions of each kind have happened.
        self.happened: Counter[str] = Counter()
        island.router.observers.append(self._observe)

    def schedule(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._clock.at(action.at_s, partial(self._due, action))

    def calm(self) -> None:
        """From here on nothing goes wrong any more; requests that are open stay."""
        self._is_calm = True
        self._waiting.clear()
        self._leaving.clear()
        self._conditions.calm()
        self._launcher.calm()

    def _due(self, action: Action) -> None:
        if isinstance(action, Leave) and action.phase:
            self._leaving[action.key] = action
        elif action.after:
            self._waiting[action.after].append(action)
        else:
            self._do(action)

    def _observe(self, now: float, event: Event, sends: list[Send]) -> None:
        if self._waiting:
            self._look_for(type(event.message if isinstance(event, Received) else event).__name__)
            for send in sends:
                self._look_for(type(send.message).__name__)
        if self._leaving and sends:
            self._look_at_phases()

    def _look_for(self, name: str) -> None:
        for action in self._waiting.pop(name, ()):
            self._clock.after(action.delay_s, partial(self._do, action))

    def _look_at_phases(self) -> None:
        core = self._island.router.core
        for key, leave in list(self._leaving.items()):
            state = core and core.requests.get(key)
            if state and state.phase.value == leave.phase:
                del self._leaving[key]
                self._clock.after(leave.delay_s, partial(self._do, leave))

    def _do(self, action: Action) -> None:
        if self._is_calm and not isinstance(action, Arrive):
            return
        self.happened[kind_of(action)] += 1
        match action:
            case Arrive():
                self._clients.arrive(action)
            case Leave(key=key):
                self._clients.leave(key)
            case Kill():
                self._launcher.kill(action)
            case Hang():
                self._launcher.hang(action)
            case Cut(process=name):
                self._island.world.processes[name].cut()
            case Late() | FailingCopies() | SlowCopies():
                self._conditions.add(action)
            case Jump(process=name, seconds=seconds):
                self._launcher.process(name).local_clock.jump(seconds)
            case Drift(process=name, rate=rate):
                self._launcher.process(name).local_clock.run_at(rate)
