"""A process which hangs is killed if it has the pool's memory mapped, and left alone if not."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from alignedserve.kv.format import BlockFormat
from alignedserve.kvpool.segment import Segment
from alignedserve.protocol.messages import Hello, InstanceLimits
from alignedserve.router.fence import DisconnectedWriters, LiveRouterHost
from alignedserve.types import Epoch, InstanceId

FORM = BlockFormat(num_layers=1, block_size=16, num_kv_heads=1, head_dim=16, dtype="float32")
HANG = """
import os, signal, sys
from alignedserve.kvpool.segment import Segment
segment = Segment.attach(sys.argv[1]) if len(sys.argv) > 1 else None
os.write(1, b".")
os.kill(os.getpid(), signal.SIGSTOP)
"""


class Host(LiveRouterHost):
    time_s = 0.0

    def now(self) -> float:
        return self.time_s


@pytest.fixture
def segment() -> Iterator[str]:
    name = f"alignedserve-test-{os.getpid()}-fence"
    Segment.create(name, FORM, 4).close()
    yield name
    Segment.unlink(name)


@contextmanager
def hanging(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", HANG, *arguments], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout and process.stdout.read(1) == b"."
            yield process
        finally:
            # Nothing waits for a stopped process when a test fails.
            process.kill()


def test_a_user_of_the_pool_is_killed_though_it_is_stopped(segment: str) -> None:
    with hanging(segment) as user:
        assert Host().kill_user(user.pid, segment)
        assert user.wait(30) == -signal.SIGKILL


def test_nobody_else_is(segment: str) -> None:
    with hanging() as stranger:
        assert not Host().kill_user(stranger.pid, segment)
        assert not Host().kill_user(stranger.pid, "")
        assert stranger.poll() is None
        stranger.kill()
    assert not Host().kill_user(stranger.pid, segment), "it is gone"
    mine = Segment.attach(segment)
    assert not Host().kill_user(os.getpid(), segment), "not itself"
    mine.close()


def hello_of(pid: int, role: str = "prefill") -> Hello:
    return Hello(role, InstanceId(f"{role}-0"), Epoch(1), pid, {}, InstanceLimits())


def test_a_lost_process_that_could_write_is_waited_for_and_then_killed(segment: str) -> None:
    host = Host()
    parting = DisconnectedWriters(10.0, host)
    parting.segment = segment
    with hanging(segment) as user:
        assert parting.add(hello_of(user.pid))
        host.time_s = 9.9
        assert not parting.take_gone()
        host.time_s = 10.0
        gone = parting.take_gone()
        assert user.wait(30) == -signal.SIGKILL
    assert [hello.pid for hello in (*gone, *parting.take_gone())] == [user.pid]
    assert not len(parting)


def test_a_process_that_comes_back_or_has_ended_is_not_waited_for(segment: str) -> None:
    parting = DisconnectedWriters(10.0, Host())
    parting.segment = segment
    with hanging(segment) as user:
        assert parting.add(hello_of(user.pid))
        assert parting.back(hello_of(user.pid)) == hello_of(user.pid)
        assert parting.back(hello_of(user.pid)) is None
        user.kill()
    assert not parting.add(hello_of(user.pid)), "it is gone"


def test_a_pool_is_put_off_while_a_process_of_an_earlier_router_could_write(segment: str) -> None:
    host = Host()
    parting = DisconnectedWriters(10.0, host)
    pool = hello_of(os.getpid() + 1, "kvpool")
    pool.segment = segment
    with hanging(segment) as user:
        assert parting.puts_off(pool, connected=[])
        assert not parting.puts_off(pool, connected=[user.pid])
        host.time_s = 10.0
        assert parting.puts_off(pool, connected=[])
        assert user.wait(30) == -signal.SIGKILL
    assert not parting.puts_off(pool, connected=[])


def test_a_lost_pool_is_not_waited_for_though_it_maps_its_own_memory(segment: str) -> None:
    parting = DisconnectedWriters(0.0, Host())
    parting.segment = segment
    with hanging(segment) as pool:
        assert not parting.add(hello_of(pool.pid, "kvpool"))
        assert not len(parting) and pool.poll() is None
        pool.kill()


@pytest.fixture
def no_descriptors() -> Iterator[None]:
    """This process can open no further file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_a_free_descriptor_a_process_is_waited_for_and_not_killed(
    segment: str, request: pytest.FixtureRequest
) -> None:
    parting = DisconnectedWriters(0.0, Host())
    parting.segment = segment
    pool = hello_of(os.getpid() + 1, "kvpool")
    pool.segment = segment
    with hanging() as stranger, hanging(segment) as user:
        request.getfixturevalue("no_descriptors")
        assert parting.add(hello_of(user.pid)) and parting.add(hello_of(stranger.pid, "decode"))
        assert parting.puts_off(pool, connected=[user.pid, stranger.pid])
        assert not parting.take_gone()
        assert stranger.poll() is None and user.poll() is None
        resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1:] * 2)
        gone = parting.take_gone()
        assert user.wait(30) == -signal.SIGKILL
        gone += parting.take_gone()
        # The one that is killed may be gone at once.
        assert sorted(hello.pid for hello in gone) == sorted([stranger.pid, user.pid])
        stranger.kill()
