"""All processes of a system are replaced under load: no call fails, and no token is wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import httpx
import pytest

from alignedserve.types import InstanceId, without_generation
from tests.launch.batch_job import check_answers, client_of, submit
from tests.launch.callers import Callers
from tests.launch.server import START_S, Server, serving
from tests.launch.streams import ask_all, engine_alone

NUM_LINES = 200


def command_of(server: Server) -> list[str]:
    return [sys.executable, "-m", "alignedserve", "restart", "--port", str(server.port)]


def restart(server: Server) -> list[str]:
    """What it says."""
    done = subprocess.run(command_of(server), capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{server.output}"
    return done.stdout.splitlines()


def pids_of(server: Server) -> dict[str, int]:
    return {
        without_generation(InstanceId(each["instance_id"])): int(each["pid"]) for each in server.processes()
    }


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("num_gateways", [1, 2])
def test_every_process_is_another_one_and_nobody_has_noticed(num_gateways: int) -> None:
    options = ["--dtype", "float32", "--pool-memory-bytes", str(64 << 20), "--gateways", str(num_gateways)]
    with serving(*options) as server:
        client = client_of(server)
        before = pids_of(server)
        job = submit(client, NUM_LINES)
        said: list[str] = []
        silences = []
        with Callers(server.url) as callers:

            async def whole() -> None:
                restarting = asyncio.create_task(asyncio.to_thread(restart, server))
                while not restarting.done():
                    texts, silence_s = await asyncio.to_thread(ask_all, server.url)
                    assert texts == engine_alone()
                    silences.append(silence_s)
                said.extend(await restarting)

            asyncio.run(whole())
        assert callers.failures == [] and callers.num_answered > 0
        assert [line.split()[0] for line in said] == [
            "prefill-0",
            "decode-0",
            "kvpool-0",
            "router",
            *(["gateway"] if num_gateways == 1 else ["gateway-0", "gateway-1"]),
        ]
        after = pids_of(server)
        assert after.keys() == before.keys()
        assert all(after[name] != before[name] for name in before)
        print(f"longest silence {max(silences):.2f} s; {callers.num_answered} short calls")
        check_answers(client, job, NUM_LINES)
        client.close()
        until(lambda: is_gone(before["gateway-0"]))
        # And once more: the one that came is no other than the first was.
        restart(server)
        assert ask_all(server.url)[0] == engine_alone()


@pytest.mark.slow
def test_a_restart_is_one_at_a_time_and_ends_with_the_system() -> None:
    with serving("--dtype", "float32", "--pool-memory-bytes", str(64 << 20)) as server:
        with subprocess.Popen(
            command_of(server), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as first:
            assert first.stdout and first.stderr
            assert first.stdout.readline().startswith("prefill-0")
            second = subprocess.run(command_of(server), capture_output=True, text=True, timeout=START_S)
            assert second.returncode == 1 and "another restart is under way" in second.stdout
            server.signal(signal.SIGTERM)
            assert "the system is stopping" in first.stdout.read()
            assert "not all processes were replaced" in first.stderr.read()
        assert first.returncode == 1
        assert server.wait() == 0, server.output


@pytest.mark.slow
def test_who_connects_while_the_gateway_is_dead_waits_for_the_next_one() -> None:
    with serving("--dtype", "float32", "--pool-memory-bytes", str(64 << 20)) as server:
        gateway = server.pid_of("gateway-0")
        os.kill(gateway, signal.SIGKILL)
        until(lambda: is_gone(gateway))
        assert httpx.get(f"{server.url}/v1/models", timeout=START_S).status_code == 200


def test_where_no_system_is_there_is_none_to_restart() -> None:
    command = [sys.executable, "-m", "alignedserve", "restart", "--port", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "no system of this user's serves 127.0.0.1:1" in done.stderr
