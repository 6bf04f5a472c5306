"""Islands as nodes come, go and fail, with islands that do as they are told; test_islands.py has real ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from alignedserve.launch import growth
from alignedserve.launch import islands as module
from alignedserve.launch.growth import Growth, LatestLoad
from alignedserve.launch.islands import NodeIslands
from alignedserve.launch.nodes import Change
from alignedserve.launch.plan import Node
from alignedserve.launch.process_supervisor import ProcessFailed
from alignedserve.protocol.address import RouterAddress

LAUNCHER = RouterAddress("127.0.0.1", 1, "")


def node(number: int) -> Node:
    return Node(f"node-{number}", f"id-{number}", 0, 0, RouterAddress(f"10.0.0.{number}", 20_000, ""), number)


@dataclass(frozen=True)
class Plan:
    node: Node

    @property
    def router(self) -> RouterAddress:
        return self.node.router


@dataclass(eq=False)
class Island:
    plan: Plan
    is_up: bool = True
    is_abandoned: bool = False
    busy: float = 0.0
    is_empty: bool = True
    end: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def name(self) -> str:
        return self.plan.node.name

    async def supervise(self) -> None:
        await self.end

    def stop(self) -> None:
        self.end.set_result(None)

    def abandon(self) -> None:
        self.is_abandoned = True


@dataclass
class Nodes:
    first: list[Node]
    may_change: bool = True
    num_wanted: int = 1
    launcher: RouterAddress = LAUNCHER
    changes: list[Change] = field(default_factory=list)
    has_failed: list[int] = field(default_factory=list)
    has_worked: set[int] = field(default_factory=set)
    growth: Growth | None = None
    num_asked: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)

    async def look(self) -> Change:
        return self.changes.pop(0) if self.changes else Change()

    async def want(self, count: int) -> None:
        if self.num_asked[-1:] != [count]:
            self.num_asked.append(count)

    def given_back(self, number: int) -> None:
        self.given.append(number)

    def failed(self, number: int) -> None:
        self.has_failed.append(number)

    def worked(self, number: int) -> None:
        self.has_worked.add(number)


class At:
    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.made: dict[int, Island] = {}
        self.said: list[str] = []
        self.told: list[tuple[list[int], list[str]]] = []
        self.leaving: set[int] = set()
        self.num_wanted = 0
        self.seen = LatestLoad()
        made: Any = self._make
        plans: Any = [Plan(each) for each in nodes.first]
        self.islands = NodeIslands(
            nodes, plans, self._plan, made, self._tell, self.said.append, lambda: self.seen
        )
        self.running = asyncio.create_task(self.islands.supervise())

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0.001)

    def _plan(self, found: Node) -> Any:
        if found.free_shm_bytes < 0:
            raise ValueError("too little memory")
        return Plan(found)

    def _make(self, plan: Plan) -> Island:
        self.made[plan.node.number] = Island(plan)
        return self.made[plan.node.number]

    def _tell(
        self,
        routers: Mapping[int, RouterAddress],
        missing: Sequence[str],
        leaving: Collection[int],
        num_wanted: int,
    ) -> None:
        self.leaving, self.num_wanted = set(leaving), num_wanted
        found = (list(routers), list(missing))
        if not self.told or self.told[-1] != found:
            self.told.append(found)


def play(nodes: Nodes, scenario: Callable[[At], Awaitable[None]]) -> None:
    async def within_time() -> None:
        async with asyncio.timeout(60):
            await scenario(At(nodes))

    asyncio.run(within_time())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.001)


def test_nodes_that_come_are_told_and_those_that_go_are_not() -> None:
    async def scenario(at: At) -> None:
        await at.until(lambda: at.told == [([0], ["1 of 2 islands are there"])])
        at.nodes.changes.append(Change(come=[node(1)]))
        await at.until(lambda: at.told[1:] == [([0, 1], [])])
        at.nodes.changes.append(Change(gone=[0]))
        await at.until(lambda: len(at.told) == 3)
        assert at.told[-1] == ([1], ["1 of 2 islands are there"])
        assert at.made[0].is_abandoned and not at.made[1].is_abandoned
        at.islands.stop()
        await at.running
        assert at.said == ["node-1 becomes an island, at 10.0.0.1", "node-0 is gone"]

    play(Nodes([node(0)], num_wanted=2), scenario)


def test_the_last_one_stays_known_until_another_comes() -> None:
    async def scenario(at: At) -> None:
        at.nodes.changes.append(Change(gone=[0]))
        await at.until(lambda: at.told[1:] == [([0], ["0 of 1 islands are there"])])
        at.nodes.changes.append(Change(come=[node(1)]))
        await at.until(lambda: at.told[2:] == [([1], [])])
        at.islands.stop()
        await at.running

    play(Nodes([node(0)]), scenario)


def test_one_that_fails_is_let_go_and_may_be_tried_again() -> None:
    async def scenario(at: At) -> None:
        await at.until(lambda: at.nodes.has_worked == {0, 1})
        at.made[1].end.set_exception(ExceptionGroup("", [ProcessFailed("node-1/router died 4 times")]))
        await at.until(lambda: at.nodes.has_failed == [1])
        lost = "an island is lost: node-1/router died 4 times"
        await at.until(lambda: at.told[-1:] == [([0], ["1 of 2 islands are there", lost])])
        assert at.made[1].is_abandoned and at.said == [lost]
        # its node, as a new one
        again = Node("node-2", "id-1", 0, 0, RouterAddress("10.0.0.1", 20_001, ""), 2)
        at.nodes.changes.append(Change(come=[again]))
        await at.until(lambda: at.told[-1:] == [([0, 2], [])])
        at.islands.stop()
        await at.running

    play(Nodes([node(0), node(1)], num_wanted=2), scenario)


def test_a_node_that_is_too_small_is_named() -> None:
    async def scenario(at: At) -> None:
        small = Node("node-1", "id-1", 0, -1, LAUNCHER, 1)
        at.nodes.changes.append(Change(come=[small]))
        problem = "node-1 can't be an island: too little memory"
        await at.until(lambda: at.told[-1:] == [([0], ["1 of 2 islands are there", problem])])
        assert at.said == [problem] and at.nodes.has_failed == [1]
        at.islands.stop()
        await at.running

    play(Nodes([node(0)], num_wanted=2), scenario)


def test_in_a_cluster_that_has_worked_the_loss_of_all_is_waited_out() -> None:
    async def scenario(at: At) -> None:
        await at.until(lambda: at.nodes.has_worked)
        at.made[0].end.set_exception(ProcessFailed("gone"))
        await at.until(lambda: at.nodes.has_failed == [0])
        at.nodes.changes.append(Change(come=[node(1)]))
        await at.until(lambda: at.told[-1:] == [([1], [])])
        at.islands.stop()
        await at.running

    play(Nodes([node(0)]), scenario)


@pytest.mark.parametrize("may_change", [False, True], ids=["this machine", "never up"])
def test_the_loss_of_the_only_one_ends_the_system(may_change: bool) -> None:
    async def scenario(at: At) -> None:
        await at.until(lambda: at.made[0])
        at.made[0].is_up = not may_change
        at.made[0].end.set_exception(ExceptionGroup("", [ProcessFailed("prefill-0: no such model")]))
        with pytest.raises(ProcessFailed, match="no such model"):
            await at.running

    play(Nodes([node(0)], may_change), scenario)


def test_what_is_no_failure_of_a_process_is_never_waited_out() -> None:
    async def scenario(at: At) -> None:
        await at.until(lambda: at.nodes.has_worked == {0, 1})
        at.made[1].end.set_exception(ExceptionGroup("", [KeyError("a bug")]))
        with pytest.raises(KeyError):
            await at.running

    play(Nodes([node(0), node(1)]), scenario)


def test_up_is_when_as_many_are_up_as_there_should_be() -> None:
    async def scenario(at: At) -> None:
        at.made[0].is_up = False
        waiting = asyncio.create_task(at.islands.until_up())
        at.nodes.changes.append(Change(come=[node(2)]))
        await at.until(lambda: 2 in at.made and at.nodes.has_worked == {1, 2})
        await waiting
        at.islands.stop()
        await at.running

    play(Nodes([node(0), node(1)], num_wanted=2), scenario)


def test_one_more_is_asked_for_while_objectives_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "SHORT_S", 0.05)

    async def scenario(at: At) -> None:
        at.seen = LatestLoad(num_missed=100)
        await at.until(lambda: at.nodes.num_asked == [1, 2])
        at.seen = LatestLoad()
        await at.until(lambda: at.num_wanted == 2)
        # There are as many as there should be at least.
        assert at.told == [([0], [])] and at.said == ["2 islands are wanted; 1 are up"]
        at.nodes.changes.append(Change(come=[node(1)]))
        await at.until(lambda: at.told[-1:] == [([0, 1], [])])
        at.islands.stop()
        await at.running

    play(Nodes([node(0)], growth=Growth(1, 3, 1)), scenario)


@pytest.mark.parametrize("is_empty", [True, False], ids=["when it is empty", "when time is up"])
def test_what_is_too_much_is_given_back(monkeypatch: pytest.MonkeyPatch, is_empty: bool) -> None:
    monkeypatch.setattr(growth, "CALM_S", 0.05)
    monkeypatch.setattr(module, "LEAVING_S", 0.0 if is_empty else 0.05)
    monkeypatch.setattr(module, "LEFT_S", 3600.0 if is_empty else 0.2)

    async def scenario(at: At) -> None:
        at.made[1].is_empty = False
        await at.until(lambda: at.leaving == {1})
        assert not at.nodes.given and at.told[-1] == ([0, 1], [])
        at.made[1].is_empty = is_empty
        await at.until(lambda: at.nodes.given == [1])
        await at.until(lambda: at.told[-1] == ([0], []))
        assert at.made[1].is_abandoned and not at.made[0].is_abandoned and not at.nodes.has_failed
        assert at.nodes.num_asked == [2, 1] and at.leaving == set()
        assert at.said == [
            "1 islands are wanted; 2 are up",
            "node-1 gets no more requests, and is given back when it has none",
            "node-1 is given back",
        ]
        at.islands.stop()
        await at.running

    play(Nodes([node(0), node(1)], growth=Growth(1, 2, 2)), scenario)


def test_what_is_being_given_back_is_kept_when_another_one_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "CALM_S", 0.05)

    async def scenario(at: At) -> None:
        at.made[1].is_empty = False
        await at.until(lambda: at.leaving == {1})
        at.nodes.changes.append(Change(gone=[0]))
        await at.until(lambda: at.told[-1:] == [([1], [])])
        await at.until(lambda: not at.leaving)
        assert at.said[-1] == "node-1 is kept" and not at.nodes.given
        at.islands.stop()
        await at.running

    play(Nodes([node(0), node(1)], growth=Growth(1, 2, 2)), scenario)


def test_nothing_is_decided_while_an_island_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "CALM_S", 0.05)
    monkeypatch.setattr(module, "LEAVING_S", 0.0)

    async def scenario(at: At) -> None:
        at.made[1].is_up = False
        begun_s = time.monotonic()
        await at.until(lambda: at.nodes.num_asked == [2] and time.monotonic() > begun_s + 0.1)
        assert not at.leaving
        at.made[1].is_up = True
        await at.until(lambda: at.nodes.given == [1])
        at.islands.stop()
        await at.running

    play(Nodes([node(0), node(1)], growth=Growth(1, 2, 2)), scenario)
