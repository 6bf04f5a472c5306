"""What the launcher gives and does when it is asked at its Unix socket."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from alignedserve.launch import control
from alignedserve.launch.control import DONE, FAILED, Control, RestartFailed, Say, prepare_directory
from alignedserve.process.listening import ask_for_listener, bind

HOST = "127.0.0.1"


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="control-", dir="/tmp") as name:
        yield Path(name)


@asynccontextmanager
async def controlled(
    path: Path, restart: Callable[[Say], Awaitable[None]]
) -> AsyncIterator[tuple[Control, socket.socket]]:
    listener = bind(HOST, 0)
    found = Control(str(path), listener, restart)
    await found.listen()
    try:
        yield found, listener
    finally:
        await found.close()


async def nothing(say: Say) -> None:
    say("nothing to do")


async def asked(path: Path, question: bytes) -> list[str]:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(question)
    lines = (await reader.read()).decode().splitlines()
    writer.close()
    return lines


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within_time() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(within_time())


def test_whoever_asks_for_the_socket_takes_connections_there_and_they_wait_from_one_to_the_next(
    directory: Path,
) -> None:
    async def scenario() -> None:
        path = directory / "control"
        async with controlled(path, nothing) as (_, listener):
            address = listener.getsockname()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)
            with await asyncio.to_thread(ask_for_listener, str(path)) as first:
                first.listen()
                with socket.create_connection(address):
                    first.accept()[0].close()
            with (
                socket.create_connection(address) as waiting,
                await asyncio.to_thread(ask_for_listener, str(path)) as second,
                second.accept()[0] as connection,
            ):
                assert connection.getpeername() == waiting.getsockname()
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    play(scenario)


def test_when_the_system_stops_nobody_is_given_the_socket_and_nobody_waits_there(directory: Path) -> None:
    async def scenario() -> None:
        path = directory / "control"
        async with controlled(path, nothing) as (found, listener):
            address = listener.getsockname()
            with await asyncio.to_thread(ask_for_listener, str(path)) as last:
                last.listen()
                found.stop()
                with socket.create_connection(address):
                    pass
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)
            with pytest.raises(ConnectionError):
                await asyncio.to_thread(ask_for_listener, str(path))

    play(scenario)


def test_a_restart_is_told_line_by_line_and_how_it_ended(directory: Path) -> None:
    async def fails(say: Say) -> None:
        say("one of two")
        raise RestartFailed("there is no room")

    async def scenario() -> None:
        async with controlled(directory / "one", nothing), controlled(directory / "other", fails):
            assert await asked(directory / "one", b"restart\n") == ["nothing to do", DONE]
            assert await asked(directory / "other", b"restart\n") == [
                "one of two",
                f"{FAILED}there is no room",
            ]
            assert await asked(directory / "one", b"what?\n") == []

    play(scenario)


def test_a_restart_goes_on_when_whoever_asked_is_gone(directory: Path) -> None:
    async def scenario() -> None:
        begun, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def slow(say: Say) -> None:
            begun.set()
            await may_end.wait()
            for _ in range(3):
                say("a line for nobody")
                await asyncio.sleep(0.01)
            ended.set()

        async with controlled(directory / "control", slow):
            _, writer = await asyncio.open_unix_connection(directory / "control")
            writer.write(b"restart\n")
            await begun.wait()
            writer.transport.abort()
            may_end.set()
            await ended.wait()

    play(scenario)


def test_a_restart_is_given_up_when_the_system_stops(directory: Path) -> None:
    async def scenario() -> None:
        begun = asyncio.Event()

        async def endless(say: Say) -> None:
            begun.set()
            await asyncio.Event().wait()

        async with controlled(directory / "control", endless) as (found, _):
            asking = asyncio.create_task(asked(directory / "control", b"restart\n"))
            await begun.wait()
            found.stop()
            assert await asking == [f"{FAILED}the system is stopping"]

    play(scenario)


def test_there_is_one_launcher_at_an_address(directory: Path) -> None:
    async def scenario() -> None:
        path = directory / "control"
        async with controlled(path, nothing):
            with bind(HOST, 0) as listener, pytest.raises(OSError, match="in use"):
                await Control(str(path), listener, nothing).listen()
        # What a killed one has left is nobody's.
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
        async with controlled(path, nothing):
            pass
        assert not path.exists()

    play(scenario)


def test_the_directory_is_this_users_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = directory / "own"
    monkeypatch.setattr(control, "_directory", lambda: own)
    prepare_directory()
    prepare_directory()
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o755)
    with pytest.raises(ValueError, match="of this user alone"):
        prepare_directory()
    own.rmdir()
    own.symlink_to(directory)
    with pytest.raises(ValueError, match="of this user alone"):
        prepare_directory()
    os.unlink(own)
