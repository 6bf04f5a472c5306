"""Keeps one island on each node of the system, as nodes are added, lost and fail.

On one machine there is one island, and the system ends with it. A cluster goes on with the islands that it has. A new
node becomes an island, a lost node takes its island with it, and a node on which an island failed is tried again later.
If the number of islands is decided by traffic (growth.py), surplus islands are given back to the autoscaler. New
requests then go to others. Running requests end there, or continue elsewhere if that takes too long. If no island was
ever up, the failure of the last one ends the system, because the settings do not fit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from alignedserve.launch.console import Alarm
from alignedserve.launch.control import Say
from alignedserve.launch.growth import LatestLoad, leaving
from alignedserve.launch.island_supervisor import IslandSupervisor
from alignedserve.launch.nodes import LOOK_S, Change, Nodes
from alignedserve.launch.plan import IslandPlan, Node
from alignedserve.launch.process_supervisor import ProcessFailed, ProcessSupervisor
from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.messages import SetAdapters

# seconds between two checks at the start whether all islands are up
UP_LOOK_S = 0.05
# An island that is given back ends when it has no requests, but not before LEAVING_S seconds, within which gateways
# learn about it. It ends after LEFT_S seconds in any case.
LEAVING_S, LEFT_S = 2.0, 300.0


class Tell(Protocol):
    def __call__(
        self,
        routers: Mapping[int, RouterAddress],
        missing: Sequence[str],
        leaving: Collection[int],
        num_wanted: int,
    ) -> None: ...


class NodeIslands:
    def __init__(
        self,
        nodes: Nodes,
        first: Sequence[IslandPlan],
        plan: Callable[[Node], IslandPlan],
        make: Callable[[IslandPlan], IslandSupervisor],
        tell: Tell,
        say: Callable[[str], None],
        attained: Callable[[], LatestLoad] = LatestLoad,
    ) -> None:
        """`first` are the plans of the first nodes. `plan` makes those of later nodes, and raises ValueError. `tell`
        receives the islands, and what is missing. `attained` returns the objectives met and missed since its last
        call."""
        self._nodes = nodes
        self._attained = attained
        self._plan = plan
        self._make = make
        self._tell = tell
        self._say = say
        self._islands: dict[int, IslandSupervisor] = {}
        self._running: dict[asyncio.Task[None], int] = {}
        # why a node is no island, by its id, until it is one or is lost
        self._problems: dict[str | None, str] = {}
        # when islands began to be given back, by their numbers
        self._leaving: dict[int, float] = {}
        # the islands that gateways know; when there are none, gateways keep the last ones
        self._told: dict[int, RouterAddress] = {}
        self._was_up = False
        self._is_stopping = False
        for each in first:
            self._islands[each.node.number] = make(each)

    async def supervise(self) -> None:
        """Runs until all islands have stopped after `stop`. Raises ProcessFailed if no island can be kept."""
        for number in self._islands:
            self._start(number)
        self._tell_gateways()
        try:
            while not self._is_over:
                if self._nodes.may_change and not self._is_stopping:
                    self._changed(await self._nodes.look())
                if self._running:
                    await asyncio.wait(self._running, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(LOOK_S)
                self._take_ended()
                await self._grow()
                self._tell_gateways()
        finally:
            for task in self._running:
                task.cancel()
            if self._running:
                await asyncio.wait(self._running)

    async def until_up(self) -> None:
        """Returns when the wanted number of islands is up."""
        while sum(island.is_up for island in self._islands.values()) < self._nodes.num_wanted:
            await asyncio.sleep(UP_LOOK_S)

    @property
    def gateways(self) -> list[ProcessSupervisor]:
        """The gateways on islands' hosts."""
        return [island.gateway for island in self._islands.values() if island.gateway]

    @property
    def hosts(self) -> list[tuple[str, str | None]]:
        """The names of the present islands, and Ray's ids of their nodes."""
        return [(island.name, island.plan.node.node_id) for island in self._islands.values()]

    async def restart(self, say: Say) -> None:
        """Replaces all processes of all present islands, one after the other. Raises RestartFailed."""
        for number, island in list(self._islands.items()):
            if self._islands.get(number) is island:
                await island.restart(say)

    def set_adapters(self, order: SetAdapters) -> None:
        """Sends the order to all routers that are connected."""
        for island in self._islands.values():
            island.set_adapters(order)

    def stop(self) -> None:
        """Orders all islands to stop."""
        self._is_stopping = True
        for island in self._islands.values():
            island.stop()

    @property
    def _is_over(self) -> bool:
        return not self._running and (self._is_stopping or not self._nodes.may_change)

    def _start(self, number: int) -> None:
        self._running[asyncio.create_task(self._islands[number].supervise())] = number

    def _changed(self, change: Change) -> None:
        for number in change.gone:
            island = self._islands[number]
            self._say(Alarm(f"{island.name} is gone"))
            self._problems.pop(island.plan.node.node_id, None)
            self._let_go(number)
        for problem in change.problems:
            self._say(Alarm(problem))
        for node in change.come:
            try:
                plan = self._plan(node)
            except ValueError as error:
                self._failed(node, f"{node.name} can't be an island: {error}")
                continue
            self._say(f"{node.name} becomes an island, at {node.router.host}")
            self._islands[node.number] = self._make(plan)
            self._start(node.number)

    # ---- growing and shrinking ----

    async def _grow(self) -> None:
        growth = self._nodes.growth
        if growth is None or self._is_stopping:
            return
        here = [island for number, island in self._islands.items() if number not in self._leaving]
        # Nothing is decided while islands start, which may take long.
        if all(island.is_up for island in here):
            busy = sum(island.busy for island in here) / max(1, len(here))
            before = growth.wanted
            growth.look(time.monotonic(), len(here), replace(self._attained(), busy=busy))
            if growth.wanted != before:
                self._say(f"{growth.wanted} islands are wanted; {len(here)} are up")
        await self._nodes.want(growth.wanted)
        self._choose_leaving(growth.wanted)
        self._give_back()

    def _choose_leaving(self, wanted: int) -> None:
        now_leaving = leaving(self._islands, self._leaving, wanted)
        for number in sorted(now_leaving - self._leaving.keys()):
            self._leaving[number] = time.monotonic()
            self._say(
                f"{self._islands[number].name} gets no more requests, and is given back when it has none"
            )
        for number in sorted(self._leaving.keys() - now_leaving):
            del self._leaving[number]
            if island := self._islands.get(number):
                self._say(f"{island.name} is kept")

    def _give_back(self) -> None:
        for number, since_s in list(self._leaving.items()):
            age_s = time.monotonic() - since_s
            island = self._islands[number]
            if age_s >= LEFT_S or (age_s >= LEAVING_S and island.is_empty):
                self._nodes.given_back(number)
                self._say(f"{island.name} is given back")
                self._let_go(number)

    def _let_go(self, number: int) -> None:
        self._leaving.pop(number, None)
        self._islands.pop(number).abandon()
        for task in [task for task, of in self._running.items() if of == number]:
            task.cancel()

    def _take_ended(self) -> None:
        for number, island in self._islands.items():
            if island.is_up:
                self._was_up = True
                self._nodes.worked(number)
                self._problems.pop(island.plan.node.node_id, None)
        for task in [task for task in self._running if task.done()]:
            number = self._running.pop(task)
            if number not in self._islands or task.cancelled():
                continue
            error = task.exception()
            if error is not None:
                self._lost(number, first_failure(error))
            elif self._nodes.may_change and not self._is_stopping:
                self._lost(number, ProcessFailed("its router has stopped"))

    def _lost(self, number: int, failure: BaseException) -> None:
        is_hopeless = len(self._islands) == 1 and not (self._nodes.may_change and self._was_up)
        if is_hopeless or not isinstance(failure, ProcessFailed):
            raise failure
        node = self._islands[number].plan.node
        self._let_go(number)
        self._failed(node, f"an island is lost: {failure}")

    def _failed(self, node: Node, problem: str) -> None:
        self._nodes.failed(node.number)
        self._say(Alarm(problem))
        self._problems[node.node_id] = problem

    def _tell_gateways(self) -> None:
        here = {number: island.plan.router for number, island in self._islands.items()}
        self._told = here or self._told
        growth = self._nodes.growth
        self._tell(
            self._told, self._missing(), set(self._leaving), growth.wanted_without_limit if growth else 0
        )

    def _missing(self) -> list[str]:
        wanted = self._nodes.num_wanted
        if len(self._islands) >= wanted:
            return []
        return [f"{len(self._islands)} of {wanted} islands are there", *self._problems.values()]


def first_failure(error: BaseException) -> BaseException:
    """Returns the first failure of a group. The others were cancelled or follow from it."""
    while isinstance(error, BaseExceptionGroup):
        failed = [each for each in error.exceptions if isinstance(each, ProcessFailed)]
        error = (failed or error.exceptions)[0]
    return error
