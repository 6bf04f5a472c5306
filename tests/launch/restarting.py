"""`alignedserve restart`, while clients ask all the while."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from alignedserve.types import InstanceId, without_generation
from tests.launch.batch_job import check_answers, client_of, submit
from tests.launch.callers import Callers
from tests.launch.server import START_S, Server, is_gone, until
from tests.launch.streams import ask_all, engine_alone

NUM_LINES = 200


def command_of(server: Server) -> list[str]:
    return [sys.executable, "-m", "alignedserve", "restart", "--port", str(server.port)]


def restart(server: Server) -> list[str]:
    """What it says."""
    done = subprocess.run(command_of(server), capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{server.output}"
    return done.stdout.splitlines()


def check_restart(server: Server, gateways: list[str]) -> None:
    """Every process is another one, and nobody has noticed. `gateways`: as the launcher calls them."""
    client = client_of(server)
    before = _pids_of(server)
    job = submit(client, NUM_LINES)
    with Callers(server.url) as callers:
        said, silence_s = asyncio.run(_restart_under_streams(server))
    assert callers.failures == [] and callers.num_answered > 0
    assert [line.split()[0] for line in said] == ["prefill-0", "decode-0", "kvpool-0", "router", *gateways]
    logged = [line.removeprefix("restart: ") for line in server.output.splitlines() if "restart: " in line]
    assert logged == ["every process is replaced, one after the other", *said, "done"]
    after = _pids_of(server)
    assert after.keys() == before.keys()
    assert all(after[name] != before[name] for name in before)
    print(f"longest silence {silence_s:.2f} s; {callers.num_answered} short calls")
    check_answers(client, job, NUM_LINES)
    client.close()
    until(lambda: is_gone(before["gateway-0"]))


async def _restart_under_streams(server: Server) -> tuple[list[str], float]:
    """What it says, and the longest silence of a stream."""
    silences = []
    restarting = asyncio.create_task(asyncio.to_thread(restart, server))
    while not restarting.done():
        texts, silence_s = await asyncio.to_thread(ask_all, server.url)
        assert texts == engine_alone()
        silences.append(silence_s)
    return await restarting, max(silences)


def _pids_of(server: Server) -> dict[str, int]:
    return {
        without_generation(InstanceId(each["instance_id"])): int(each["pid"]) for each in server.processes()
    }
