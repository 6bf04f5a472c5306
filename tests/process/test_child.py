"""A process that works for this one (alignedserve/process/child.py), in real processes (echo_process.py)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from alignedserve.process.child import Child, ChildEnded, NotStarted, Starter
from tests.playing import play
from tests.process import echo_process

PROGRAM = echo_process.__name__


def child(patience_s: float = 60, greeting: Callable[[], Sequence[bytes]] | None = None) -> Child:
    return Child(Starter(PROGRAM, greeting), patience_s)


async def pid_of(echo: Child) -> int:
    return int((await echo.ask(b"pid")).split()[1])


def test_it_answers_one_after_the_other() -> None:
    async def scenario() -> None:
        async with aclosing(child()) as echo:
            first = asyncio.create_task(echo.ask(b"slowly 0.05 first"))
            second = asyncio.create_task(echo.ask(b"slowly 0 second"))
            assert (await first, await second) == (b"first", b"second")
            large = b"x" * 3_000_000
            assert (await echo.ask(large)).startswith(large)

    asyncio.run(scenario())


def test_it_stays_in_the_session_but_gets_no_signals_of_the_terminal() -> None:
    async def scenario() -> None:
        async with aclosing(child()) as echo:
            pid = await pid_of(echo)
            assert os.getsid(pid) == os.getsid(0)
            assert os.getpgid(pid) == pid != os.getpgid(0)

    asyncio.run(scenario())


def test_an_answer_that_nobody_waits_for_is_nobody_elses(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "asked"
        os.mkfifo(path)
        async with aclosing(child()) as echo:
            pid = await pid_of(echo)
            asking = asyncio.create_task(echo.ask(b"greeting ", os.fsencode(path)))
            waiting = asyncio.create_task(echo.ask(b"slowly 0 never"))
            while not path.with_name("asked.reached").exists():
                await asyncio.sleep(0.01)
            asking.cancel()
            waiting.cancel()
            await asyncio.wait({asking, waiting})
            assert asking.cancelled() and waiting.cancelled()
            # It answers now. Opening it for reading and writing never blocks, even if the child has exited.
            answering = os.open(path, os.O_RDWR)
            assert await pid_of(echo) == pid
            os.close(answering)

    play(scenario)


def test_whoever_stops_waiting_for_its_greeting_leaves_it_well(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "greeting"
        os.mkfifo(path)
        async with aclosing(child(greeting=lambda: (b"greeting ", os.fsencode(path)))) as echo:
            preparing = asyncio.create_task(echo.prepare())
            while not path.with_name("greeting.reached").exists():
                await asyncio.sleep(0.01)
            preparing.cancel()
            await asyncio.wait({preparing})
            assert preparing.cancelled()
            # it answers its greeting now
            os.close(os.open(path, os.O_WRONLY))
            assert await pid_of(echo) == await pid_of(echo)

    asyncio.run(scenario())


def test_one_that_ends_is_followed_by_another_which_is_asked_once_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with aclosing(child()) as echo:
            assert await echo.ask(b"once " + os.fsencode(tmp_path / "marker")) == b"twice"
            pid = await pid_of(echo)
            os.kill(pid, signal.SIGKILL)
            assert await pid_of(echo) != pid
            with pytest.raises(ChildEnded) as ended:
                await echo.ask(b"exit 7")
            assert ended.value.status == 7

    asyncio.run(scenario())


def test_one_whose_time_is_up_or_that_hangs_is_not_asked_again() -> None:
    async def scenario() -> None:
        async with aclosing(child(patience_s=60)) as echo, aclosing(child(patience_s=0.2)) as hasty:
            for each, asked in ((echo, b"alarm"), (hasty, b"slowly 3600 never")):
                with pytest.raises(ChildEnded) as ended:
                    await each.ask(asked)
                assert ended.value.status == -signal.SIGALRM
            assert await pid_of(echo)

    asyncio.run(scenario())


def test_it_ends_in_the_middle_of_something() -> None:
    async def scenario() -> None:
        echo = child()
        pid = await pid_of(echo)
        asking = asyncio.create_task(echo.ask(b"slowly 3600 never"))
        await asyncio.sleep(0.01)
        await echo.aclose()
        await asyncio.wait({asking})
        assert asking.cancelled()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(scenario())


def test_a_start_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with aclosing(child()) as echo:
            with monkeypatch.context() as patch:
                patch.setattr("alignedserve.process.child.sys.executable", "/nothing/here")
                with pytest.raises(NotStarted):
                    await echo.ask(b"pid")
            assert await pid_of(echo)

    asyncio.run(scenario())


def test_one_that_ends_over_its_greeting_is_none_that_ended_over_its_work() -> None:
    async def scenario() -> None:
        async with aclosing(child(greeting=lambda: (b"exit 7",))) as echo:
            with pytest.raises(NotStarted) as raised:
                await echo.ask(b"pid")
            assert raised.value.status == 7

    asyncio.run(scenario())


def sharing(num: int, **options: Any) -> tuple[Starter, list[Child]]:
    starter = Starter(PROGRAM, keeps_spare=True, **options)
    return starter, [Child(starter, 60) for _ in range(num)]


async def spare_of(starter: Starter) -> int:
    """Returns the pid of the spare child, when it is ready."""
    assert starter._spare
    return (await asyncio.shield(starter._spare)).pid


def test_a_spare_one_takes_the_place_of_one_that_has_ended_and_is_followed_by_another() -> None:
    async def scenario() -> None:
        starter, (first, second) = sharing(2)
        async with aclosing(first), aclosing(second):
            pids = [await pid_of(first)]
            for child in (first, second, first):
                spare = await spare_of(starter)
                if child is first:
                    os.kill(pids[-1], signal.SIGKILL)
                assert await pid_of(child) == spare
                pids += [spare] if child is first else []
            spare = await spare_of(starter)
            assert spare not in pids and len(set(pids)) == 3
        for pid in (*pids, spare):
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(scenario())


def test_a_spare_one_that_has_ended_is_not_taken() -> None:
    async def scenario() -> None:
        starter, (echo,) = sharing(1)
        async with aclosing(echo):
            pid = await pid_of(echo)
            spare = await spare_of(starter)
            os.kill(spare, signal.SIGKILL)
            assert starter._spare
            await starter._spare.result().wait()
            os.kill(pid, signal.SIGKILL)
            assert await pid_of(echo) not in (pid, spare)

    asyncio.run(scenario())


def test_a_spare_one_that_can_not_be_started_leaves_the_others_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        starter, (echo,) = sharing(1)
        async with aclosing(echo):
            pid = await pid_of(echo)
            spare = await spare_of(starter)
            with monkeypatch.context() as patch:
                patch.setattr("alignedserve.process.child.sys.executable", "/nothing/here")
                os.kill(pid, signal.SIGKILL)
                assert await pid_of(echo) == spare
                with pytest.raises(NotStarted) as raised:
                    await spare_of(starter)
                assert isinstance(raised.value.error, FileNotFoundError)
            assert await pid_of(echo) == spare
            os.kill(spare, signal.SIGKILL)
            assert await pid_of(echo) not in (pid, spare)
            assert await spare_of(starter)

    asyncio.run(scenario())


def test_those_that_hang_in_their_greeting_end_with_the_rest(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "greeting"
        os.mkfifo(path)
        starter, (echo,) = sharing(1, greeting=lambda: (b"greeting ", os.fsencode(path)), patience_s=3600)
        preparing = asyncio.create_task(echo.prepare())
        while not starter._greeted:
            await asyncio.sleep(0.01)
        (process,) = starter._greeted
        await echo.aclose()
        await asyncio.wait({preparing})
        assert preparing.cancelled() and not starter._untaken
        assert process.returncode == -signal.SIGKILL

    asyncio.run(scenario())


def test_one_that_hangs_in_its_greeting_is_told_apart(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "greeting"
        os.mkfifo(path)
        starter = Starter(PROGRAM, lambda: (b"greeting ", os.fsencode(path)), patience_s=0.2)
        async with aclosing(Child(starter, 60)) as echo:
            with pytest.raises(NotStarted) as raised:
                await echo.prepare()
            assert raised.value.is_hung and raised.value.error is None

    asyncio.run(scenario())
