"""Executes actions on an island with simulated gateways. It observes the router."""

from __future__ import annotations

from functools import partial

from alignedserve.router.events import Event, Send
from alignedserve.sim.island import SimIsland
from alignedserve.sim.process import SimProcess
from alignedserve.sim.router import SimRouter
from alignedserve.types import InstanceId, RequestKey
from alignedserve.vopr.clients import Clients
from alignedserve.vopr.conditions import Conditions
from alignedserve.vopr.driver import Driver
from alignedserve.vopr.history import (
    ROUTER,
    Action,
    Arrive,
    Disconnect,
    Drift,
    FailingCopies,
    FlipBit,
    Hang,
    Jump,
    Kill,
    Late,
    Leave,
    SlowCopies,
)
from alignedserve.vopr.launcher import Launcher


class IslandDriver(Driver):
    def __init__(
        self, island: SimIsland, clients: Clients, launcher: Launcher, conditions: Conditions
    ) -> None:
        super().__init__(island.world.clock, launcher)
        self._island = island
        self._clients = clients
        self._conditions = conditions
        # Requests to leave: in which phase, and how many seconds after it was entered.
        self._leaving: dict[RequestKey, Leave] = {}
        island.router.observers += [self.observer(), self._look_at_phases]

    def calm(self) -> None:
        super().calm()
        self._leaving.clear()
        self._conditions.calm()
        self._launcher.calm()

    def is_put_off(self, action: Action) -> bool:
        if isinstance(action, Leave) and action.phase:
            self._leaving[action.key] = action
            return True
        return False

    def _look_at_phases(self, now: float, event: Event, sends: list[Send]) -> None:
        if not (self._leaving and sends):
            return
        core = self._island.router.core
        for key, leave in list(self._leaving.items()):
            state = core and core.state.requests.get(key)
            if state and state.phase.value == leave.phase:
                del self._leaving[key]
                self._clock.after(leave.delay_s, partial(self._do, leave))

    def act(self, action: Action) -> None:
        match action:
            case Arrive():
                self._clients.arrive(action)
            case Leave(key=key):
                self._clients.leave(key)
            case Kill():
                self._launcher.kill(action)
            case Hang():
                self._launcher.hang(action)
            case Disconnect(process=name):
                self._island.world.processes[name].cut()
            case Late() | FailingCopies() | SlowCopies():
                self._conditions.add(action)
            case FlipBit(number=number):
                self._island.world.flip_bit(self._island.pool.segment, number)
            case Jump(process=name, seconds=seconds):
                self._process(name).local_clock.jump(seconds)
            case Drift(process=name, rate=rate):
                self._process(name).local_clock.run_at(rate)
            case _:
                raise ValueError(f"{action}: happens to whole systems only")

    def _process(self, name: InstanceId) -> SimProcess | SimRouter:
        return self._island.router if name == ROUTER else self._island.world.processes[name]
