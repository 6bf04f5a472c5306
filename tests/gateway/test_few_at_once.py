"""A thousand things at once are done a few in each turn of the event loop, and whoever comes meanwhile has a turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from alignedserve.gateway.few_at_once import FewAtOnce


class Noted:
    """What was done, in order, and in which turn of the event loop."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.turns: Counter[int] = Counter()
        self.turn = 0

    def work(self, name: str) -> Callable[[], None]:
        def note() -> None:
            self.done.append(name)
            self.turns[self.turn] += 1

        return note

    async def until(self, count: int) -> None:
        while len(self.done) < count:
            await asyncio.sleep(0)
            self.turn += 1


def test_a_few_are_done_in_each_turn() -> None:
    async def scenario() -> None:
        turns, noted = FewAtOnce(at_once=4), Noted()
        for number in range(10):
            turns.do(noted.work(str(number)))
        assert noted.done == ["0", "1", "2", "3"]
        noted.turns.clear()
        await noted.until(10)
        assert noted.done == [str(number) for number in range(10)]
        assert sorted(noted.turns.values()) == [2, 4]

    asyncio.run(scenario())


def test_what_comes_alone_is_done_at_once() -> None:
    async def scenario() -> None:
        turns, noted = FewAtOnce(at_once=1), Noted()
        for number in range(3):
            turns.do(noted.work(str(number)))
            assert len(noted.done) == number + 1
            # Two turns: the count is begun anew in the one that comes next.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(scenario())


def test_owners_take_turns_and_each_keeps_its_order() -> None:
    async def scenario() -> None:
        turns, noted = FewAtOnce(at_once=2), Noted()
        for number in range(6):
            turns.do(noted.work(f"a{number}"), "a")
        turns.do(noted.work("b0"), "b")
        turns.do(noted.work("b1"), "b")
        await noted.until(8)
        assert noted.done == ["a0", "a1", "a2", "b0", "a3", "b1", "a4", "a5"]

    asyncio.run(scenario())


def test_what_is_added_meanwhile_does_not_overtake() -> None:
    async def scenario() -> None:
        turns, noted = FewAtOnce(at_once=1), Noted()
        for number in range(3):
            turns.do(noted.work(str(number)))
        while len(noted.done) < 6:
            turns.do(noted.work(str(3 + noted.turn)))
            await asyncio.sleep(0)
            noted.turn += 1
        assert noted.done == [str(number) for number in range(len(noted.done))]

    asyncio.run(scenario())


def test_one_that_fails_does_not_keep_the_others_from_their_turns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise RuntimeError("this one fails")

    async def scenario() -> None:
        turns, noted = FewAtOnce(at_once=2), Noted()
        for work in (noted.work("0"), noted.work("1"), fail, noted.work("2"), noted.work("3")):
            turns.do(work)
        await noted.until(4)
        assert noted.done == ["0", "1", "2", "3"]

    asyncio.run(scenario())
    assert "this one fails" in caplog.text
