"""`alignedserve serve` as a user starts it: a process of its own, with all that hangs on it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from alignedserve.launch.leftovers import descendants
from alignedserve.launch.ports import free_port
from benchmarks.footprint import Footprint

# Far more than it takes on two idle cores (10 to 20 s): tests share theirs.
START_S = 180.0
STOP_S = 60.0
_LOOK_S = 0.02
# For clients of httpx2: certificates, which nobody needs here, take longer to load than a call takes.
NO_TLS = False
HEARS_HANGUP = ("env", "--default-signal=HUP")
# Enough for the demo model, and more than enough systems fit on one machine.
POOL = ("--pool-memory-bytes", str(64 << 20))
# What engines and servers compute alike, to the last bit.
EXACT = ("--dtype", "float32")


def until(condition: Callable[[], object], told: Callable[[], str] = str) -> None:
    """`told` is asked for the failure's message."""
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(_LOOK_S)


def is_gone(pid: int) -> bool:
    """Whether the process has ended, and whoever started it has been told."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def message_of(line: str) -> str:
    """The message of a line of the launcher. Lines of processes keep their fields in text format."""
    if line.startswith('{"time": '):
        return str(json.loads(line)["message"])
    return re.sub(r"^\d{4}-\d\d-\d\dT[0-9:.]{12}Z (?![A-Z]+ )", "", line)


def program_of(pid: int) -> str:
    """Its name; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


class Server:
    def __init__(
        self,
        *options: str,
        state: Path | None = None,
        program: str = "alignedserve",
        cwd: Path | None = None,
    ) -> None:
        """`state`: the state directory of another one, which goes on where that one ended. `program`: a module that is
        run instead. `cwd`: the directory that has the package, if it is another one."""
        self.port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}"
        # What it has printed, without times, or the messages of JSON lines.
        self.lines: list[str] = []
        self.raw_lines: list[str] = []
        # A connection for each call, as another client has it: to a gateway that is there, whichever was before.
        unkept = httpx2.Limits(max_keepalive_connections=0)
        self._client = httpx2.Client(base_url=self.url, timeout=60, limits=unkept, verify=NO_TLS)
        # directly in /tmp: a socket's path must be short
        self._state = tempfile.TemporaryDirectory(prefix="state-", dir="/tmp", ignore_cleanup_errors=True)
        own = ["--state-dir", str(state or self._state.name), "--port", str(self.port)]
        # The tests may run under nohup, which the server would inherit.
        command = [*HEARS_HANGUP, sys.executable, "-m", program, "serve", *own, *options]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=cwd,
        )
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def launcher_pid(self) -> int:
        """The process id of the launcher, which the first process has started."""
        return next(pid for pid, _ in descendants(self.pid) if program_of(pid) != "sh")

    def until_said(self, pattern: str, timeout_s: float = START_S) -> str:
        """The line."""
        with self._changed:
            found = self._changed.wait_for(lambda: self._said(pattern) or self._is_over, timeout_s)
        line = self._said(pattern)
        assert found and line, f"{pattern!r} was not said:\n{self.output}"
        return line

    def until_ready(self) -> float:
        """Seconds that it took."""
        return float(self.until_said("ready after").split()[2])

    def signal(self, number: signal.Signals, whole_group: bool = False) -> None:
        """`whole_group`: as a terminal does it for a ctrl-C."""
        os.killpg(self.pid, number) if whole_group else os.kill(self.pid, number)

    def wait(self, timeout_s: float = STOP_S) -> int:
        """Its exit code."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it runs on after {timeout_s:g} s:\n{self.output}") from None
        self._reader.join(timeout_s)
        self._client.close()
        self._state.cleanup()
        return code

    def get(self, path: str) -> httpx2.Response:
        return self._client.get(path)

    def post(self, path: str, body: Mapping[str, object]) -> httpx2.Response:
        return self._client.post(path, json=body)

    def processes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/v1/cluster").json().get("processes", [])
        return found

    def pid_of(self, instance_id: str) -> int:
        return next(int(each["pid"]) for each in self.processes() if each["instance_id"] == instance_id)

    def pids(self, *roles: str) -> list[int]:
        """The ids of the processes of these roles."""
        return [int(each["pid"]) for each in self.processes() if each["role"] in roles]

    def programs(self) -> set[str]:
        """The names of the programs that its processes run."""
        return {program_of(pid) for pid, _ in descendants(self.pid)}

    def until_up(self, name: str, killed: Collection[int] = ()) -> int:
        """Its process id, of its successor if it was killed."""
        found: list[int] = []

        def is_up() -> bool:
            for each in self.processes():
                if each["instance_id"] == name and each["state"] == "up" and each["pid"] not in killed:
                    found.append(int(each["pid"]))
            return bool(found)

        until(is_up, lambda: f"{name} is not up:\n{self.output}")
        return found[0]

    def redis_pid(self) -> int:
        """The process id of the latest one that came up."""
        return int(re.findall(r"^redis is up after .* pid (\d+)$", self.output, re.MULTILINE)[-1])

    def kill(self, *groups: Sequence[str]) -> set[int]:
        """Kills the processes with the names of one group together, those of the next while the system recovers from
        that. Returns their pids."""
        killed: set[int] = set()
        for names in groups:
            pids = [self.until_up(name, killed) for name in names]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            killed.update(pids)
        return killed

    def until_whole(self) -> None:
        """All processes are up, and nothing is left of any request."""
        until(self._is_whole_and_empty, lambda: f"{self.get('/v1/cluster').text}\n{self.output}")

    def _is_whole_and_empty(self) -> bool:
        cluster = self.get("/v1/cluster").json()
        return (
            "processes" in cluster
            and all(each["state"] == "up" and not each["blocks"]["used"] for each in cluster["processes"])
            and not cluster["requests"]
        )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def _is_over(self) -> bool:
        return not self.is_running and not self._reader.is_alive()

    def _said(self, pattern: str) -> str | None:
        return next((line for line in self.lines if re.search(pattern, line)), None)

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            with self._changed:
                self.raw_lines.append(line.rstrip())
                self.lines.append(message_of(line.rstrip()))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


@contextmanager
def starting(
    *options: str, state: Path | None = None, program: str = "alignedserve", cwd: Path | None = None
) -> Iterator[Server]:
    """As soon as it is begun. If it still runs at the end, it is killed."""
    server = Server(*options, state=state, program=program, cwd=cwd)
    try:
        yield server
    finally:
        if server.is_running:
            server.signal(signal.SIGKILL)
            server.wait()


@contextmanager
def serving(
    *options: str, state: Path | None = None, program: str = "alignedserve", cwd: Path | None = None
) -> Iterator[Server]:
    """Ready. At the end, if it still runs, it is stopped by SIGTERM, and has to leave nothing."""
    with starting(*options, state=state, program=program, cwd=cwd) as server:
        server.until_ready()
        footprint = Footprint(server.pid)
        yield server
        if server.is_running:
            server.signal(signal.SIGTERM)
            assert server.wait() == 0, server.output
        footprint.check_gone()
