"""A batch on the whole system, real, while its processes are killed: every line is answered, rightly, and once."""

from __future__ import annotations

import os
import random
import re
import signal
import time

import pytest

from tests.launch.batch_job import check_answers, client_of, submit
from tests.launch.server import START_S, Server, serving

VICTIMS = ("redis", "gateway", "router")
# at any moment of a line's way: before it is taken, while it runs, while its answer is stored
MAX_PAUSE_S = 1.0


@pytest.mark.parametrize(
    ("num_lines", "num_kills"), [(300, 3), pytest.param(500, 10, marks=pytest.mark.slow)]
)
def test_a_batch_survives_kills_with_every_answer_once(num_lines: int, num_kills: int) -> None:
    rng = random.Random(7)
    with serving("--dtype", "float32", "--batch-max-num-lines", "32") as server:
        client = client_of(server)
        batch_id = submit(client, num_lines)
        killed = [kill(server, VICTIMS[number % 3], rng) for number in range(num_kills)]
        assert len(killed) == num_kills
        check_answers(client, batch_id, num_lines)
        server.until_whole()


def kill(server: Server, victim: str, rng: random.Random) -> int:
    time.sleep(rng.uniform(0, MAX_PAUSE_S))
    pid = until_pid(server, victim)
    os.kill(pid, signal.SIGKILL)
    return pid


def until_pid(server: Server, victim: str) -> int:
    """Of whoever is it now: not of one that was killed."""
    deadline = time.monotonic() + START_S
    while True:
        pid = redis_pid(server) if victim == "redis" else process_pid(server, victim)
        if pid is not None and os.path.exists(f"/proc/{pid}"):
            return pid
        assert time.monotonic() < deadline, server.output
        time.sleep(0.05)


def redis_pid(server: Server) -> int | None:
    said = re.findall(r"^redis is up after .* pid (\d+)$", server.output, re.MULTILINE)
    return int(said[-1]) if said else None


def process_pid(server: Server, role: str) -> int | None:
    try:
        processes = server.processes()
    except Exception:
        # the gateway is being started again
        return None
    return next((each["pid"] for each in processes if each["role"] == role and each["state"] == "up"), None)
