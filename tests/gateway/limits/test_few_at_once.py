"""Each turn of the event loop handles only a few of a thousand simultaneous requests, so new ones get a turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from alignedserve.gateway.limits.few_at_once import FewAtOnce


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


def test_patient_work_has_what_is_left_of_a_turn_and_one_piece_in_any_case() -> None:
    async def scenario() -> None:
        turns, noted = FewAtOnce(at_once=3), Noted()
        for number in range(7):
            turns.do(noted.work(f"p{number}"), "a", is_patient=True)
        for number in range(5):
            turns.do(noted.work(f"u{number}"), "a")
        await noted.until(12)
        first, second, third, fourth = noted.done[:3], noted.done[3:6], noted.done[6:9], noted.done[9:]
        assert first == ["p0", "p1", "p2"]
        assert second == ["u0", "u1", "p3"] and third == ["u2", "u3", "p4"] and fourth == ["u4", "p5", "p6"]

    asyncio.run(scenario())


def test_other_work_passes_patient_work_that_waits() -> None:
    async def scenario() -> None:
        turns, noted = FewAtOnce(at_once=2), Noted()
        for number in range(4):
            turns.do(noted.work(f"p{number}"), is_patient=True)
        await noted.until(3)
        # Only patient work waits, and there is room in this turn.
        turns.do(noted.work("u0"))
        turns.do(noted.work("p4"), is_patient=True)
        await noted.until(6)
        assert noted.done == ["p0", "p1", "p2", "p3", "u0", "p4"]

    asyncio.run(scenario())


@pytest.mark.parametrize("at_once", [1, 2])
def test_none_waits_for_ever_while_the_other_kind_comes_on_and_on(at_once: int) -> None:
    async def scenario() -> None:
        turns, noted = FewAtOnce(at_once), Noted()
        for turn in range(40):
            for number in range(4):
                turns.do(noted.work("u"), str(number))
                turns.do(noted.work("p"), str(number), is_patient=True)
            await asyncio.sleep(0)
            assert noted.done.count("u") >= turn and noted.done.count("p") >= turn

    asyncio.run(scenario())


def test_heavy_work_fills_a_turn_sooner() -> None:
    async def scenario() -> None:
        turns, noted = FewAtOnce(at_once=4), Noted()
        for number in range(3):
            turns.do(noted.work(f"h{number}"), "a", weight=2)
        for number in range(5):
            turns.do(noted.work(str(number)), "b")
        assert noted.done == ["h0", "h1"]
        noted.turns.clear()
        await noted.until(8)
        assert noted.done[2:] == ["h2", "0", "1", "2", "3", "4"]
        assert sorted(noted.turns.values()) == [3, 3]

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


def test_what_is_dropped_takes_no_turn() -> None:
    async def scenario() -> None:
        turns, noted = FewAtOnce(at_once=1), Noted()
        works = [noted.work(str(number)) for number in range(1000)]
        for work in works:
            turns.do(work, "a")
        for work in works[1:-1]:
            turns.drop(work, "a")
            turns.drop(work, "a")
        turns.drop(works[-1], "b")
        await noted.until(2)
        assert noted.done == ["0", "999"] and noted.turn < 5

    asyncio.run(scenario())
