"""Executes actions on a whole system. It observes the routers and the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alignedserve.types import InstanceId
from alignedserve.vopr.conditions import Conditions
from alignedserve.vopr.driver import Driver
from alignedserve.vopr.front_end.conditions import FrontConditions
from alignedserve.vopr.front_end.front import Front
from alignedserve.vopr.front_end.store_link import StoreObserver
from alignedserve.vopr.front_end.virtual_network import VirtualConnection
from alignedserve.vopr.history import (
    Action,
    Ask,
    Disconnect,
    Disturb,
    FailingCopies,
    Hang,
    Jump,
    Kill,
    Late,
    LoseStore,
    Regroup,
    SlowCopies,
    Stop,
    StoreForgetful,
    StoreSlow,
    SubmitJob,
)
from alignedserve.vopr.launcher import STOP_S, Launcher

# Multiples of a router's silence after which a vanished connection has been noticed.
_MISSED_AFTER = 1.5


class WholeDriver(Driver, StoreObserver):
    def __init__(
        self,
        front: Front,
        launcher: Launcher,
        conditions: FrontConditions,
        copies: Conditions,
        silence_s: float,
    ) -> None:
        super().__init__(front.clock, launcher)
        self._front = front
        self._conditions = conditions
        self._copies = copies
        self._silence_s = silence_s
        self._gateways = {gateway.name: gateway for gateway in front.gateways}
        front.store_observers.append(self)
        for name, router in zip(front.island_names, front.routers, strict=True):
            router.observers.append(self.observer(f"{name}/"))

    def made(self, process: str, method: str, args: Sequence[Any], result: Any) -> None:
        self.look_for([(method, InstanceId(process))])

    def calm(self) -> None:
        super().calm()
        self._conditions.calm()
        self._copies.calm()
        self._launcher.calm()
        self._regroup_all()
        for gateway in self._front.gateways:
            gateway.set_clock_right()
        # Faults that have begun may have to be noticed first.
        self._front.quiet.trouble(_MISSED_AFTER * self._silence_s)

    def act(self, action: Action) -> None:
        if not isinstance(action, Ask | SubmitJob):
            self._front.quiet.trouble(self._lasts_s(action))
        match action:
            case Ask():
                self._front.clients.ask(action)
            case SubmitJob():
                self._front.clients.batch(action)
            case Kill():
                self._launcher.kill(action)
            case Hang():
                self._launcher.hang(action)
            case Stop():
                self._launcher.stop(action)
            case Regroup(islands=islands, seconds=seconds):
                self._front.regroup(islands)
                self._front.clock.after(seconds, self._regroup_all)
            case Jump(process=name, seconds=seconds):
                self._gateways[name].set_clock_ahead(seconds)
            case Disconnect(process=name):
                for connection in self._connections_of(name):
                    connection.cut()
            case Disturb():
                self._disturb(action)
            case FailingCopies() | SlowCopies():
                self._copies.add(action)
            case Late() | LoseStore() | StoreSlow() | StoreForgetful():
                self._conditions.add(action)
            case _:
                raise ValueError(f"{action}: happens to islands alone only")

    def _regroup_all(self) -> None:
        self._front.regroup(range(len(self._front.islands)))

    def _disturb(self, action: Disturb) -> None:
        connections = self._connections_of(action.process)
        if not connections:
            return
        connection = connections[action.number % len(connections)]
        match action.how:
            case "stall":
                connection.stall(action.seconds)
            case "process is gone":
                connection.half_open(connection.client)
            case "router is gone":
                connection.half_open(connection.server)
            case "vanish":
                connection.vanish()

    def _connections_of(self, process: InstanceId) -> list[VirtualConnection]:
        connections = self._front.loop.network.connections.values()
        return [each for each in connections if each.process == process]

    def _lasts_s(self, action: Action) -> float:
        """Returns for how many seconds the fault lasts."""
        missed_s = _MISSED_AFTER * self._silence_s
        match action:
            case Kill(processes=downs):
                return max(downs.values()) + missed_s
            case Stop(seconds=seconds):
                return STOP_S + seconds
            case Disturb() | Hang() | Late() | Regroup():
                return action.seconds + missed_s
            case FailingCopies() | SlowCopies() | LoseStore() | StoreSlow() | StoreForgetful():
                return action.seconds
            case _:
                return missed_s
