"""The whole system ends in the middle of a batch job, in good order or not, and is started again: the job goes on."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from benchmarks.footprint import Footprint
from tests.launch.batch_job import check_answers, client_of, num_completed, submit, until
from tests.launch.server import Server, serving

NUM_LINES = 500
# few at a time: the job must not be over before it is looked at
OPTIONS = ("--dtype", "float32", "--pool-memory-bytes", str(64 << 20), "--batch-max-num-lines", "2")


@pytest.fixture
def state() -> Iterator[Path]:
    """Directly in /tmp: a socket's path must be short."""
    with TemporaryDirectory(prefix="state-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.mark.slow
def test_a_batch_survives_two_ends_of_everything(state: Path) -> None:
    with serving(*OPTIONS, state=state) as server:
        batch_id = submit(client_of(server), NUM_LINES)
        wait_for(server, batch_id, NUM_LINES // 10)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.output
    with serving(*OPTIONS, state=state) as server:
        done = wait_for(server, batch_id, NUM_LINES // 4)
        kill_all(server)
    with serving(*OPTIONS, state=state) as server:
        client = client_of(server)
        # what was answered stays answered
        assert num_completed(client.batches.retrieve(batch_id)) >= done
        check_answers(client, batch_id, NUM_LINES)
        server.until_whole()


def wait_for(server: Server, batch_id: str, num_lines: int) -> int:
    batch = until(client_of(server), batch_id, lambda each: num_completed(each) >= num_lines)
    assert batch.status == "in_progress" and num_completed(batch) < NUM_LINES
    return num_completed(batch)


def kill_all(server: Server) -> None:
    """Launcher, store, gateway, router, pool, instances, at one moment."""
    footprint = Footprint(server.pid)
    found = re.search(r"^redis is up after .* pid (\d+)$", server.output, re.MULTILINE)
    assert found
    pids = [server.pid, int(found[1]), *(each["pid"] for each in server.processes())]
    assert len(pids) == 7
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
    footprint.check_gone()
