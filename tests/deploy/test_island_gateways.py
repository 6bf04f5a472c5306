"""Gateways on islands' hosts: two hosts in namespaces, each a node of a Ray cluster, and the launcher on the first."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from alignedserve import demo
from alignedserve.kernels.cpu.build import build, cache_dir, library_path
from alignedserve.launch.ray_cluster import OBJECT_STORE_BYTES
from alignedserve.store.server import find_server
from tests.deploy.changes import in_turn
from tests.deploy.hosts import Net, network, packages_of_this_environment, why_not
from tests.launch.streams import engine_alone

ROOT = Path(__file__).parents[2]
HEAD, WORKER = 1, 2
# No other launcher of this user has it: their sockets are in one directory.
PORT = 8017
URL = f"http://127.0.0.1:{PORT}"
PATIENCE_S = 180.0
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=5", "--disable-usage-stats"]


@dataclass
class Cluster:
    net: Net
    env: dict[str, str]
    log: Path

    def popen(self, number: int, *command: str, **options: Any) -> subprocess.Popen[str]:
        return self.net.hosts[number].popen([*command], cwd=ROOT, env=self.env, **options)

    def run(self, number: int, *command: str) -> str:
        process = self.popen(number, *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, f"{said}\n{self.log.read_text()}"
        return said

    def get(self, number: int, path: str) -> Any:
        """What the gateway on this host says; None if there is none."""
        process = self.popen(
            number,
            *(sys.executable, "-c", f"import httpx2; print(httpx2.get('{URL}{path}', timeout=30).text)"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        said, _ = process.communicate(timeout=PATIENCE_S)
        return json.loads(said) if process.returncode == 0 else None

    def gateways(self) -> dict[str, int]:
        """The process ids of the gateways that are up, as their hosts number them."""
        found = (self.get(HEAD, "/v1/cluster") or {}).get("processes", [])
        return {
            each["instance_id"]: each["pid"]
            for each in found
            if each["role"] == "gateway" and each["state"] == "up"
        }

    def until(self, what: str, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: it is not so\n{self.log.read_text()}"
            time.sleep(0.2)

    @contextlib.contextmanager
    def asking(self, number: int) -> Iterator[Callable[[], list[str]]]:
        """All streams of the gateway on this host have begun. Yields what returns their texts."""
        with self._in_the_middle(number, "streams") as rest:
            yield lambda: rest()["texts"]

    @contextlib.contextmanager
    def calling(self, number: int) -> Iterator[None]:
        """Calls the gateway on this host in the block: none may fail."""
        with self._in_the_middle(number, "calls") as rest:
            yield
            said = rest()
            assert said["failures"] == [] and said["num_answered"] > 1

    @contextlib.contextmanager
    def _in_the_middle(self, number: int, what: str) -> Iterator[Callable[[], Any]]:
        command = (sys.executable, "-m", "tests.deploy.ask", URL, what)
        process = self.popen(number, *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin and process.stdout
        try:
            assert process.stdout.readline() == "in the middle\n", self.log.read_text()

            def rest() -> Any:
                said, _ = process.communicate("\n", timeout=PATIENCE_S)
                return json.loads(said)

            yield rest
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(f"gateways on islands' hosts: {reason}")
    # Hosts find the kernels there.
    build(library_path())
    login = packages_of_this_environment() | {"OMP_NUM_THREADS": "1"}
    env = os.environ | {
        "ALIGNEDSERVE_CACHE_DIR": str(cache_dir()),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PYTHONUNBUFFERED": "1",
    }
    with network(login) as net:
        for number in (HEAD, WORKER):
            net.add(number)
        yield Cluster(net, env, net.directory / "serve.log")


@contextlib.contextmanager
def served(cluster: Cluster) -> Iterator[subprocess.Popen[str]]:
    """Ends as SIGTERM ends it."""
    head, objects = cluster.net.ip(HEAD), f"--object-store-memory={OBJECT_STORE_BYTES}"
    redis = (find_server(), "--bind", head, "--port", "6390", "--save", "", "--protected-mode", "no")
    storing = cluster.popen(HEAD, *redis, stdout=subprocess.DEVNULL)
    cluster.run(HEAD, *RAY, "--head", f"--node-ip-address={head}", objects, "--include-dashboard=false")
    worker = f"--node-ip-address={cluster.net.ip(WORKER)}"
    cluster.run(WORKER, *RAY, f"--address={head}:6379", worker, objects)
    options = ("--address", f"{head}:6379", "--min-islands", "2", "--dtype", "float32")
    everywhere = ("--host", "0.0.0.0", "--port", str(PORT), "--allow-no-auth")  # noqa: S104
    more = ("--redis-url", f"redis://{head}:6390", "--pool-memory-bytes", str(64 << 20), "--island-gateways")
    command = (
        sys.executable,
        "-m",
        "alignedserve",
        "serve",
        str(demo.MODEL_DIR),
        *options,
        *everywhere,
        *more,
    )
    named = ("--served-model-name", "demo")
    with cluster.log.open("w") as log:
        serving = cluster.popen(HEAD, *command, *named, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield serving
            pid = cluster.net.hosts[HEAD].run("pgrep -o -f '^[^ ]*python[^ ]* -m alignedserve serve'").strip()
            cluster.net.hosts[HEAD].run(f"kill {pid}")
            assert serving.wait(PATIENCE_S) == 0, cluster.log.read_text()
        finally:
            for process in (serving, storing):
                process.kill()
                process.wait()


@pytest.mark.slow
@in_turn(2)
def test_an_islands_host_answers_and_heals_and_is_restarted_with_the_others(cluster: Cluster) -> None:
    with served(cluster):
        cluster.until("two gateways", lambda: len(cluster.gateways()) == 2)
        names = cluster.gateways().keys()
        # The numbers of islands are in the order of the nodes' ids.
        (name,) = names - {"gateway-0"}
        assert name in ("gateway-of-island-0", "gateway-of-island-1")
        for number in (HEAD, WORKER):
            cluster.until("healthy", lambda number=number: cluster.get(number, "/health") == {"status": "ok"})  # type: ignore[misc]
        with cluster.asking(WORKER) as rest:
            assert rest() == engine_alone()

        # Its death costs the streams of no other one, and it is started again.
        before = cluster.gateways()
        with cluster.asking(HEAD) as rest:
            cluster.net.hosts[WORKER].run(f"kill -9 {before[name]}")
            assert rest() == engine_alone()
        cluster.until(
            "another process",
            lambda: (now := cluster.gateways()).keys() == names and now[name] != before[name],
        )
        with cluster.asking(WORKER) as rest:
            assert rest() == engine_alone()

        with cluster.asking(WORKER) as rest, cluster.calling(WORKER):
            command = (sys.executable, "-m", "alignedserve", "restart", "--host", "0.0.0.0")  # noqa: S104
            said = cluster.run(HEAD, *command, "--port", str(PORT))
            assert re.search("^node-[01]/gateway replaced in", said, re.MULTILINE)
            assert rest() == engine_alone()
        with cluster.asking(WORKER) as rest:
            assert rest() == engine_alone()
    for number in (HEAD, WORKER):
        assert cluster.get(number, "/health") is None
