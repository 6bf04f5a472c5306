"""asyncio on virtual time: its guarantees hold, nothing waits, and two runs are the same."""

from __future__ import annotations

import asyncio
import secrets
import time

import pytest

from alignedserve.sim.clock import Clock
from alignedserve.vopr.front_end.virtual_host import WALL_START_S, hosted
from alignedserve.vopr.front_end.virtual_loop import Deadlock, Livelock, VirtualLoop


def test_time_passes_at_once() -> None:
    async def main() -> float:
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    assert VirtualLoop().run(main()) == 86_400


def test_what_is_due_at_one_time_comes_in_the_order_in_which_it_was_asked_for() -> None:
    clock, found = Clock(), list[str]()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, found.append, "timer 1")
        clock.after(1.0, lambda: found.append("event"))
        loop.call_later(1.0, found.append, "timer 2")
        cancelled = loop.call_later(1.0, found.append, "cancelled")
        loop.call_at(-5.0, found.append, "overdue")
        cancelled.cancel()
        await asyncio.sleep(2)

    VirtualLoop(clock).run(main())
    # An event runs in the clock's step; timers run after it, since a step makes them ready.
    assert found == ["overdue", "timer 1", "event", "timer 2"]


def test_callbacks_that_make_each_other_ready_for_ever_are_a_livelock() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Livelock, match="no time passes"):
        VirtualLoop().run(main())


def test_asyncio_has_all_that_it_has_elsewhere() -> None:
    async def main() -> list[object]:
        queue: asyncio.Queue[int] = asyncio.Queue(1)
        found: list[object] = []

        async def put() -> None:
            for number in range(3):
                await queue.put(number)

        async def get() -> None:
            for _ in range(3):
                found.append(await queue.get())

        async with asyncio.TaskGroup() as group:
            group.create_task(put())
            group.create_task(get())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 4)
        found.append(asyncio.get_running_loop().time())
        found.append(await asyncio.to_thread(lambda: "at once"))
        done, pending = await asyncio.wait(
            {asyncio.create_task(asyncio.sleep(each)) for each in (1, 9)}, timeout=5
        )
        return [*found, len(done), len(pending)]

    assert VirtualLoop().run(main()) == [0, 1, 2, 7, "at once", 1, 1]


def test_a_deadlock_is_an_error_that_names_the_tasks() -> None:
    async def main() -> None:
        await asyncio.create_task(_forever(), name="the one that waits")

    with pytest.raises(Deadlock, match=r"the one that waits \(in _forever, line \d+\)"):
        VirtualLoop().run(main())


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()


def test_an_error_that_nobody_awaits_is_kept() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)

    loop = VirtualLoop()
    loop.run(main())
    assert [type(each["exception"]) for each in loop.errors] == [ZeroDivisionError]


def test_sets_of_tasks_have_the_same_order_in_each_run() -> None:
    async def main() -> list[str]:
        others = {asyncio.create_task(asyncio.sleep(1), name=str(number)) for number in range(100)}
        return [task.get_name() for task in others]

    # Objects in between make addresses differ.
    first, between = VirtualLoop().run(main()), [object() for _ in range(1000)]
    assert VirtualLoop().run(main()) == first and between


def test_a_process_that_hangs_wakes_up_late_and_one_that_was_killed_does_nothing_more() -> None:
    found: list[tuple[str, float]] = []

    async def ticking(name: str) -> None:
        try:
            while True:
                found.append((name, asyncio.get_running_loop().time()))
                await asyncio.sleep(1)
        finally:
            found.append((f"{name} ends", asyncio.get_running_loop().time()))

    async def main() -> None:
        hanging, killed = loop.new_process("hanging"), loop.new_process("killed")
        hanging.start(ticking("hanging"))
        killed.start(ticking("killed"))
        await asyncio.sleep(0.5)
        hanging.hang()
        await asyncio.sleep(1)
        killed.kill()
        await asyncio.sleep(1)
        hanging.wake_up()
        await asyncio.sleep(1.2)
        assert found == [
            ("hanging", 0), ("killed", 0), ("killed", 1), ("hanging", 2.5), ("hanging", 3.5)
        ]  # fmt: skip

    loop = VirtualLoop()
    loop.run(main())
    # At the end of the run everything is cancelled, so that nothing is left for the garbage collector to end.
    assert {name for name, _ in found[5:]} == {"hanging ends", "killed ends"}


def test_the_host_answers_from_the_clock_and_the_seed() -> None:
    async def main() -> tuple[object, ...]:
        await asyncio.sleep(10)
        late = loop.new_process("late")
        late.wall_ahead_s = -100.0

        async def its_time() -> float:
            return time.time()

        its_s = await late.start(its_time())
        return time.time(), its_s, time.monotonic(), secrets.token_hex(4), secrets.randbelow(1000)

    answers = []
    for _ in range(2):
        loop = VirtualLoop()
        with hosted(loop.clock, 7):
            answers.append(loop.run(main()))
    assert answers[0] == answers[1]
    assert answers[0][:3] == (WALL_START_S + 10, WALL_START_S - 90, 10)
    assert abs(time.time() - WALL_START_S) > 1000
