"""`ray up` with deploy/cluster.local.yaml on simulated hosts, run by a user on none of the cluster's hosts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignedserve.kernels.cpu.build import build, cache_dir, library_path
from tests.deploy.hosts import USER, Host, Net, network, packages_of_this_environment, why_not
from tests.launch.streams import engine_alone

ROOT = Path(__file__).parents[2]
HEAD, WORKERS = 1, (2, 3)
# The processes in an island: the router, the pool, a prefill and a decode instance.
WHOLE = 4
PORT = 8000
URL = f"http://127.0.0.1:{PORT}"
# Far more than it takes on an idle machine.
PATIENCE_S = 240.0
# Each check is a login and a new process.
LOOK_S = 1.0


@dataclass
class RayUp:
    net: Net
    workers: tuple[int, ...]
    config: Path
    env: dict[str, str]
    start_s: float

    @property
    def head(self) -> Host:
        return self.net.hosts[HEAD]

    @property
    def num_islands(self) -> int:
        """Counts all hosts as islands, including the head."""
        return 1 + len(self.workers)

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self.start_s:6.1f} s  {what}", flush=True)

    def come_up(self) -> None:
        """Runs `ray up`. Returns when all hosts are islands and answers are correct."""
        self.ray("get-auth-token", "--generate")
        self.ray("up", "-y", "--no-config-cache", str(self.config))
        self.say("ray up has returned")
        self.until("the service answers", lambda: self.get("/health")[0] == 200)
        self.until("all islands are whole", lambda: self.are_whole(self.islands()))
        self.check_answers()
        self.say("all hosts are islands, and all questions are answered")

    def go_down(self) -> None:
        """Runs `ray down`. Returns when nothing is left on any host."""
        self.ray("down", "-y", str(self.config))
        for number in (HEAD, *self.workers):
            self.until(f"host {number} is empty", lambda number=number: not self.net.hosts[number].pids())  # type: ignore[misc]
        self.say("ray down has left nothing")

    def are_whole(self, islands: Mapping[int, int]) -> bool:
        return len(islands) == self.num_islands and set(islands.values()) == {WHOLE}

    def until_back(self, before: Mapping[int, int]) -> None:
        """Waits until a lost island is back with a number that is not in `before`, and all islands are complete."""
        self.until(
            "an island is there again",
            lambda: (found := self.islands()) != before and self.are_whole(found),
        )
        assert self.get("/health") == (200, {"status": "ok"})
        self.say("it is an island again")

    def check_answers(self) -> None:
        with self.asking() as asking:
            assert asking.rest()[0] == engine_alone()

    def check_streams(self, asking: Asking, what: str) -> None:
        """`what`: what has happened since they began."""
        texts, silence_s = asking.rest()
        assert texts == engine_alone(), what
        self.say(f"{what}: no stream lost a token, the longest silence was {silence_s:.1f} s")

    def ray(self, *command: str) -> str:
        """Runs one of Ray's commands, as the user."""
        user = self.net.hosts[USER]
        process = user.popen(
            [sys.executable, "-m", "ray.scripts.scripts", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=self.env,
            cwd=self.config.parent,
        )
        output, _ = process.communicate(timeout=2 * PATIENCE_S)
        assert process.returncode == 0, output
        return output

    def log(self) -> str:
        files = "~/alignedserve.log ~/new_machines.log /tmp/ray/session_latest/logs/monitor.out"
        return self.head.run(f"tail -n 80 {files}", check=False)

    def until(self, what: str, condition: Callable[[], object]) -> float:
        """Returns the seconds it took."""
        start_s = time.monotonic()
        while not condition():
            took_s = time.monotonic() - start_s
            assert took_s < PATIENCE_S, f"{what}: not after {took_s:.0f} s\n{self.log()}"
            time.sleep(LOOK_S)
        return time.monotonic() - start_s

    def get(self, path: str) -> tuple[int, Any]:
        """Returns the service's answer, or status 0 if there is none."""
        script = (
            "import json, sys, urllib.request, urllib.error\n"
            "try:\n"
            f"    answer = urllib.request.urlopen('{URL}{path}', timeout=5)\n"
            "except urllib.error.HTTPError as error:\n"
            "    answer = error\n"
            "except OSError:\n"
            "    print(0); sys.exit()\n"
            "print(answer.status); print(answer.read().decode())\n"
        )
        said = self.head.run(f"python3 - <<'END'\n{script}\nEND", check=False)
        status, _, body = said.partition("\n")
        with contextlib.suppress(ValueError):
            return int(status or 0), json.loads(body)
        return int(status or 0), body

    def islands(self) -> dict[int, int]:
        """Returns the number of running processes in each island that answers."""
        status, cluster = self.get("/v1/cluster")
        found: dict[int, int] = {}
        for process in cluster["processes"] if status == 200 else []:
            if process["state"] == "up" and process["role"] != "gateway":
                found[process["island"]] = found.get(process["island"], 0) + 1
        return found

    @contextlib.contextmanager
    def asking(self) -> Iterator[Asking]:
        """Asks all questions, and yields once all streams have begun."""
        process = self._ask("streams")
        assert process.stdin and process.stdout
        try:
            assert process.stdout.readline() == "in the middle\n"
            yield Asking(process)
        finally:
            process.kill()
            process.wait()

    def submit(self, num_lines: int) -> str:
        """Submits a batch job and returns its id."""
        return self._asked("submit", str(num_lines)).strip()

    def check_job(self, job: str, num_lines: int) -> None:
        """Returns when it is done and everything is correct."""
        self._asked("check", job, str(num_lines))

    def _asked(self, *what: str) -> str:
        process = self._ask(*what)
        said, _ = process.communicate(timeout=2 * PATIENCE_S)
        assert process.returncode == 0, f"{what}: {process.returncode}"
        return said

    def _ask(self, *what: str) -> subprocess.Popen[str]:
        """Sends requests to the service from the head."""
        return self.head.popen(
            [sys.executable, "-m", "tests.deploy.ask", URL, *what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )


# Seconds between two updates of Ray's autoscaler, and between two attempts to reach a new machine.
POLLS_OF_RAY = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "AUTOSCALER_NODE_SSH_INTERVAL_S": "1"}


@dataclass
class Asking:
    process: subprocess.Popen[str]

    def rest(self) -> tuple[list[str], float]:
        """Returns the answers, and the longest silence."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        said = json.loads(self.process.stdout.readline())
        return said["texts"], said["silence_s"]


@contextlib.contextmanager
def cluster(num_workers: int) -> Iterator[RayUp]:
    """Yields a head and workers, and a user with a copy of this repository and the file that names them. Nothing runs
    yet. Skips the test if hosts can't be made."""
    if reason := why_not():
        pytest.skip(f"ray up: {reason}")
    # Hosts find the kernels there.
    build(library_path())
    login = packages_of_this_environment() | {
        "ALIGNEDSERVE_CACHE_DIR": str(cache_dir()),
        "OMP_NUM_THREADS": "1",
        **POLLS_OF_RAY,
    }
    workers = WORKERS[:num_workers]
    with network(login) as net:
        for number in (HEAD, *workers):
            net.add(number)
        user = net.hosts[USER]
        source = user.home / "source"
        subprocess.run(
            ["rsync", "-a", "--exclude=.git", "--filter=:- .gitignore", f"{ROOT}/", f"{source}/"], check=True
        )
        _poll_often(source / "deploy/new_machines.py")
        config = source / "cluster.local.yaml"
        config.write_text(yaml.safe_dump(_config(net, workers)))
        env = os.environ | {
            "HOME": str(user.home),
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONUNBUFFERED": "1",
        }
        env.pop("RAY_AUTH_TOKEN", None)
        yield RayUp(net, workers, config, env, time.monotonic())


def _poll_often(script: Path) -> None:
    """Makes changes to machines visible within a second."""
    text = script.read_text()
    assert _POLLS in text
    script.write_text(text.replace(_POLLS, "LOOK_S, POLL_S = 1.0, 1.0"))


def _config(net: Net, workers: tuple[int, ...]) -> dict[str, Any]:
    """Returns the shipped config, except for addresses, the key, the model, and the source of packages."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "deploy/cluster.local.yaml").read_text())
    config["provider"] |= {"head_ip": net.ip(HEAD), "worker_ips": [net.ip(number) for number in workers]}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(net.key)}
    # `pip install` finds Ray in this environment, so it installs none of Ray's commands.
    config["setup_commands"].append(_RAY)
    *others, start = config["head_start_ray_commands"]
    config["head_start_ray_commands"] = [*others, start.replace(_MODEL, _TINY)]
    assert start != config["head_start_ray_commands"][-1]
    return config


_POLLS = "LOOK_S, POLL_S = 20.0, 5.0"
_MODEL = "Qwen/Qwen3-8B"
_DEMO = "~/alignedserve/alignedserve/demo/model"
_TINY = f"{_DEMO} --served-model-name demo --dtype float32 --pool-memory-bytes {64 << 20}"
_RAY = (
    r"""printf '#!%s\nfrom ray.scripts.scripts import main\nmain()\n' ~/venv/bin/python > ~/venv/bin/ray """
    "&& chmod +x ~/venv/bin/ray"
)
