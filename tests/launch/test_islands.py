"""Two nodes of a Ray cluster, here two raylets on this machine, are two islands behind one gateway."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from alignedserve.kvpool.segment import sweep
from alignedserve.launch.leftovers import descendants
from benchmarks.footprint import Footprint, files_of
from tests.launch import own_ray
from tests.launch.server import EXACT, POOL, serving, starting, until
from tests.launch.streams import ask_all, engine_alone

SWEPT_AGE_S = 5


@dataclass
class RayNodes:
    address: str
    # The process id of the second node's raylet.
    raylet: int
    process: subprocess.Popen[str]

    def add(self) -> int:
        """One more node. Returns the process id of its raylet."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayNodes]:
    with own_ray.running("tests.launch.ray_nodes", monkeypatch) as process:
        assert process.stdout
        address, raylet = process.stdout.readline().split()
        yield RayNodes(address, int(raylet), process)


@pytest.mark.slow
@pytest.mark.drawn(one_in=3)
def test_a_signal_while_nodes_are_missing_ends_it(nodes: RayNodes) -> None:
    with starting("--address", nodes.address, "--min-islands", "3", *POOL) as server:
        server.until_said("^2 of 3 nodes are there$")
        footprint = Footprint(server.pid)
        # also to the launcher, where Ray has a handler of its own
        server.signal(signal.SIGTERM, whole_group=True)
        assert server.wait() == 0, server.output
        assert server.lines[-1] == "stopped" and "Traceback" not in server.output
        footprint.check_gone()


@pytest.mark.slow
@pytest.mark.drawn(one_in=3)
def test_the_loss_of_a_node_costs_no_token_and_another_takes_its_place(nodes: RayNodes) -> None:
    raylet = nodes.raylet
    options = ("--address", nodes.address, "--min-islands", "2", *EXACT, *POOL)
    with serving(*options) as server:
        processes = server.processes()
        assert Counter(each["island"] for each in processes) == {0: 5, 1: 5}
        segments = segments_of(processes)
        names = {
            f"node-{island}/{name}"
            for island in (0, 1)
            for name in ("router", "kvpool-0", "prefill-0", "decode-0")
        }
        assert all(server.until_said(f"^{name} is up after", 1) for name in names)

        at_work: list[int] = []

        def lose_one() -> None:
            there = dict(descendants(raylet))
            at_work.append(
                sum(sum(each["requests"].values()) for each in server.processes() if each["pid"] in there)
            )
            if at_work[-1]:
                for pid in [*there, raylet]:
                    os.kill(pid, signal.SIGKILL)

        # Where the lost node has been quicker than the other one, there is nothing in the middle of which to lose it.
        while not at_work or not at_work[-1]:
            texts, silence = ask_all(server.url, lose_one)
            assert texts == engine_alone()
            assert len(at_work) < 20, "the node never has requests"
        print(f"longest silence {silence:.2f} s")
        # Ray says that the node is gone, or that its processes can't be started again: whichever comes first.
        server.until_said("^an island is lost: |^node-. is gone$")
        server.until_whole()
        (kept,) = {each["island"] for each in server.processes()}
        until(lambda: server.get("/health").json().get("missing", [""])[0] == "1 of 2 islands are there")
        (left,) = segments - segments_of(server.processes())
        assert left.exists()

        nodes.add()
        server.until_said("^node-2 becomes an island")
        for name in ("router", "kvpool-0", "prefill-0", "decode-0"):
            server.until_said(f"^node-2/{name} is up after")
        shares: Counter[int] = Counter()

        def share() -> None:
            for each in server.processes():
                shares[each["island"]] += sum(each["requests"].values())

        # One of them may have answered all of its own before anybody looks.
        for _ in range(20):
            texts, _ = ask_all(server.url, share)
            assert texts == engine_alone()
            if shares[kept] and shares[2]:
                break
        assert shares[kept] and shares[2], shares
        until(lambda: server.get("/health").json() == {"status": "ok"})
    # Whoever starts there next removes it, once it is old enough: the new node's pool may have done that.
    until(lambda: not left.exists() or left.name in sweep(min_age_s=SWEPT_AGE_S))


def segments_of(processes: list[dict[str, Any]]) -> set[Path]:
    return {path for each in processes if each["role"] == "kvpool" for path in files_of(each["pid"])}
