"""What a flood of connections has to open before a server has held it out."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from alignedserve.gateway.http.keys import owners_of
from benchmarks.attack import floods
from benchmarks.attack.flooder import MAX_OPEN
from benchmarks.attack.target import KEYS, Target
from tests.gateway.served import Served, play, served


def accept_all(server: socket.socket, kept: list[socket.socket]) -> None:
    while True:
        try:
            kept.append(server.accept()[0])
        except OSError:
            return


def test_a_flood_opens_more_connections_than_a_process_may_have_at_first() -> None:
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=512) as server:
        accepting = threading.Thread(target=accept_all, args=(server, kept))
        accepting.start()
        port = str(server.getsockname()[1])
        words = ("-m", "benchmarks.attack.flooder", "connections", "127.0.0.1", port, "no-key", "2")
        limited = ["sh", "-c", 'ulimit -Sn 100; exec "$@"', "sh", sys.executable, *words]
        said = subprocess.run(limited, capture_output=True, text=True, check=True).stdout
        server.shutdown(socket.SHUT_RDWR)
        accepting.join()
    for each in kept:
        each.close()
    assert len(kept) > 100 and said == f"{len(kept)} sent, 0 failed\n"


@pytest.mark.slow
def test_a_flood_that_opens_too_few_connections_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floods, "WINDOW_S", 0.2)
    monkeypatch.setattr(floods, "FLOOD_S", 0.3)

    async def is_held(at: Served, least: int) -> bool:
        monkeypatch.setattr(floods, "MAX_CONNECTIONS", least)
        target = Target(
            str(at.http.base_url), "127.0.0.1", at.http.base_url.port or 0, 0, Path(), "demo", 5.0
        )
        return (await floods.attack_connections(target)).held

    async def scenario() -> None:
        async with served(key_owners=owners_of(KEYS, None)) as at:
            assert await is_held(at, 1)
            assert not await is_held(at, MAX_OPEN + 1)

    play(scenario)
