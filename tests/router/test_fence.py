"""A process which hangs is killed if it has the pool's memory mapped, and left alone if not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from alignedserve.kvpool.segment import Segment
from alignedserve.protocol.kv_format import BlockFormat
from alignedserve.router.fence import kill_user

FORM = BlockFormat(num_layers=1, block_size=16, num_kv_heads=1, head_dim=16, dtype="float32")
HANG = """
import os, signal, sys
from alignedserve.kvpool.segment import Segment
segment = Segment.attach(sys.argv[1]) if len(sys.argv) > 1 else None
os.write(1, b".")
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture
def segment() -> Iterator[str]:
    name = f"alignedserve-test-{os.getpid()}-fence"
    Segment.create(name, FORM, 4).close()
    yield name
    Segment.unlink(name)


def hanging(*arguments: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", HANG, *arguments], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.read(1) == b"."
    return process


def test_a_user_of_the_pool_is_killed_though_it_is_stopped(segment: str) -> None:
    with hanging(segment) as user:
        assert kill_user(user.pid, segment)
        assert user.wait(30) == -signal.SIGKILL


def test_nobody_else_is(segment: str) -> None:
    with hanging() as stranger:
        assert not kill_user(stranger.pid, segment)
        assert not kill_user(stranger.pid, "")
        assert stranger.poll() is None
        stranger.kill()
    assert not kill_user(stranger.pid, segment), "it is gone"
    mine = Segment.attach(segment)
    assert not kill_user(os.getpid(), segment), "not itself"
    mine.close()
