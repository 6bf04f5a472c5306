"""Who goes next where one at a time can."""

from __future__ import annotations

import asyncio

import pytest

from alignedserve.gateway.limits.fair_queue import BE_SHARE, HALF_LIFE_S, FairQueue, QueueTimeout


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def use(
    turns: FairQueue,
    clock: Clock,
    owner: str,
    seconds: float,
    order: list[str],
    is_best_effort: bool = False,
) -> None:
    async with turns.turn(owner, 60, is_best_effort):
        order.append(owner)
        await asyncio.sleep(0)
        clock.now_s += seconds


def test_who_has_used_it_least_goes_next() -> None:
    async def scenario() -> None:
        clock, order = Clock(), list[str]()
        turns = FairQueue(clock)
        many = [use(turns, clock, "greedy", 1.0, order) for _ in range(14)]
        await asyncio.gather(*many, *(use(turns, clock, owner, 0.01, order) for owner in ("b", "c", "b")))
        # only what was begun already is waited for
        assert order[:4] == ["greedy", "b", "c", "b"] and order[4:] == ["greedy"] * 13
        order.clear()
        await asyncio.gather(*(use(turns, clock, owner, 0.1, order) for owner in ("x", "greedy", "b")))
        assert order == ["x", "b", "greedy"]
        # it is forgotten in time
        clock.now_s += 20 * HALF_LIFE_S
        order.clear()
        await asyncio.gather(*(use(turns, clock, owner, 0.1, order) for owner in ("x", "greedy", "y")))
        assert order == ["x", "greedy", "y"]
        assert len(turns._used) == 3

    asyncio.run(scenario())


def test_without_owners_who_came_first_goes_first() -> None:
    async def scenario() -> None:
        clock, order = Clock(), list[str]()
        turns = FairQueue(clock)

        async def numbered(number: int) -> None:
            async with turns.turn("", patience_s=60):
                order.append(str(number))
                clock.now_s += 1

        await asyncio.gather(*map(numbered, range(4)))
        assert order == ["0", "1", "2", "3"]

    asyncio.run(scenario())


def test_who_leaves_or_waits_too_long_blocks_nobody() -> None:
    async def scenario() -> None:
        turns = FairQueue()
        async with turns.turn("a", 60):
            with pytest.raises(QueueTimeout):
                async with turns.turn("b", 0.01):
                    pass
            waiting = [asyncio.create_task(use(turns, Clock(), "c", 0, [])) for _ in range(2)]
            await asyncio.sleep(0)
            waiting[0].cancel()
            await asyncio.wait({waiting[0]})
        # it is the other one's turn, who leaves before he hears of it
        waiting[1].cancel()
        await asyncio.wait({waiting[1]})
        async with turns.turn("d", 60):
            pass
        assert not turns._waiting and not turns._is_taken

    asyncio.run(scenario())


def test_the_turn_of_one_who_left_with_others_goes_to_who_is_left() -> None:
    async def scenario() -> None:
        clock, order = Clock(), list[str]()
        turns = FairQueue(clock)
        leaving = [asyncio.create_task(use(turns, clock, "job", 1.0, order)) for _ in range(3)]
        staying = asyncio.create_task(use(turns, clock, "chat", 1.0, order))
        await asyncio.sleep(0)
        assert order == ["job"]
        # as a job that is cancelled does: at once, the one that has its turn first
        for task in leaving:
            task.cancel()
        found = await asyncio.gather(*leaving, return_exceptions=True)
        assert [type(each) for each in found] == [asyncio.CancelledError] * 3
        await asyncio.wait_for(staying, 30)
        await use(turns, clock, "chat", 1.0, order)
        assert order == ["job", "chat", "chat"]

    asyncio.run(scenario())


def test_best_effort_waits_for_others_that_have_used_more() -> None:
    async def scenario() -> None:
        clock, order = Clock(), list[str]()
        turns = FairQueue(clock)
        await use(turns, clock, "chat", 10.0, order)
        await use(turns, clock, "job", 1.0, order, is_best_effort=True)
        order.clear()
        async with turns.turn("another", 60):
            tasks = [use(turns, clock, "job", 0.1, order, is_best_effort=True) for _ in range(3)]
            tasks += [use(turns, clock, "chat", 0.1, order) for _ in range(5)]
            waiting = asyncio.gather(*tasks)
            await asyncio.sleep(0)
        await waiting
        assert order == ["chat"] * 5 + ["job"] * 3

    asyncio.run(scenario())


def test_best_effort_gets_its_share_while_others_always_wait() -> None:
    async def scenario() -> None:
        clock, order = Clock(), list[str]()
        turns = FairQueue(clock)
        tasks = [asyncio.create_task(use(turns, clock, "chat", 0.01, order)) for _ in range(2000)]
        tasks += [
            asyncio.create_task(use(turns, clock, "job", 0.01, order, is_best_effort=True))
            for _ in range(2000)
        ]
        await asyncio.gather(*tasks)
        before = order[: len(order) - 1 - order[::-1].index("chat")]
        assert before.count("job") / len(before) == pytest.approx(BE_SHARE, rel=0.1)

    asyncio.run(scenario())
