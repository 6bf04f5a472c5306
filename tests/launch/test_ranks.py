"""Instances of two ranks, served: the same tokens as one process says, also when a rank of each dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from alignedserve.launch.leftovers import descendants
from tests.launch.server import Server, serving
from tests.launch.streams import ask_all, engine_alone


def instances(server: Server) -> dict[str, int]:
    """The process ids of prefill and decode instances, by their names."""
    found = [each for each in server.processes() if each["role"] in ("decode", "prefill")]
    return {each["instance_id"]: each["pid"] for each in found}


def followers(pid: int) -> list[int]:
    """The ranks that an instance's process has started."""
    return [each for each, _ in descendants(pid) if is_follower(each)]


def is_follower(pid: int) -> bool:
    try:
        return b"ranks.follower" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@pytest.mark.parametrize("link", ["host", "ipc"])
def test_streams_are_those_of_one_process(link: str) -> None:
    options = ("--dtype", "float32", "--tensor-parallel-size", "2", "--link", link)
    with serving(*options, "--pool-memory-bytes", str(64 << 20)) as server:
        assert ask_all(server.url)[0] == engine_alone()
        before = instances(server)
        victims = [follower for pid in before.values() for follower in followers(pid)]
        assert len(before) == len(victims) == 2

        def kill() -> None:
            for pid in victims:
                os.kill(pid, signal.SIGKILL)

        assert ask_all(server.url, kill)[0] == engine_alone()
        # Streams may have ended before ranks were killed, where this client came late: idle instances end as well.
        after = [server.until_up(name, killed=before.values()) for name in before]
        left = [follower for pid in after for follower in followers(pid)]
        assert len(left) == 2
    assert not any(is_follower(pid) for pid in left)
