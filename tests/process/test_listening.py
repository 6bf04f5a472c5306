"""A gateway's socket, which the next one takes over."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
from multiprocessing.synchronize import Event

import pytest

from alignedserve.process import listening
from alignedserve.process.listening import MAX_HEIRS, ask_for_listener, inherited, listen

HOST = "127.0.0.1"


@pytest.fixture
def port() -> int:
    """One at which nobody listens."""
    with listen(HOST, 0) as sock:
        return int(sock.getsockname()[1])


def test_what_waits_is_accepted_by_the_one_that_takes_over(port: int) -> None:
    with inherited(HOST, port) as first:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port))
        # As the gateway's server does once it can answer.
        first.listen()
        with socket.create_connection((HOST, port)) as waiting, inherited(HOST, port) as second:
            # As the one before does when it retires.
            first.close()
            accepted, client = second.accept()
            accepted.close()
            assert client == waiting.getsockname()
            with inherited(HOST, port) as third:
                assert third.getsockname() == (HOST, port)
            # One that did not come up costs nothing.
            with inherited(HOST, port) as fourth:
                assert fourth.getsockname() == (HOST, port)


def test_who_asks_nothing_is_given_nothing_and_others_are(port: int) -> None:
    name = f"\0alignedserve:{HOST}:{port}:0"
    with inherited(HOST, port):
        with socket.socket(socket.AF_UNIX) as gone:
            gone.connect(name)
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(name)
            asking.sendall(b"something")
            assert socket.recv_fds(asking, 1, 1)[:2] == (b"", [])
        with ask_for_listener(name) as second:
            assert second.getsockname() == (HOST, port)


def test_another_user_is_given_nothing_and_not_believed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"\0alignedserve:{HOST}:{port}:0"
    with inherited(HOST, port):
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(name)
            given: list[int] = []
            with contextlib.suppress(ConnectionError):
                asking.sendall(listening.ASK_LISTENER)
                given = socket.recv_fds(asking, 1, 1)[1]
            assert given == []
        with pytest.raises(PermissionError, match="another user's"):
            ask_for_listener(name)


def _hold(port: int, is_ready: Event) -> None:
    with inherited(HOST, port):
        is_ready.set()
        signal.pause()


def test_after_a_kill_the_next_one_listens_anew(port: int) -> None:
    context = multiprocessing.get_context("fork")
    is_ready = context.Event()
    process = context.Process(target=_hold, args=(port, is_ready))
    process.start()
    assert is_ready.wait(30)
    process.kill()
    process.join()
    with inherited(HOST, port) as sock:
        assert sock.getsockname() == (HOST, port)


def test_a_port_that_another_program_has_is_named() -> None:
    with listen(HOST, 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(OSError, match=f"{HOST}:{port}"), inherited(HOST, port):
            pass


def test_there_is_an_end_to_those_that_may_be_there(port: int) -> None:
    taken = [socket.socket(socket.AF_UNIX) for _ in range(MAX_HEIRS)]
    for number, each in enumerate(taken):
        # They do not listen.
        each.bind(f"\0alignedserve:{HOST}:{port}:{number}")
    with pytest.raises(OSError, match="in use"), inherited(HOST, port):
        pass
    for each in taken:
        each.close()
