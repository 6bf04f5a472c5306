"""The whole of it: a server, its clients, and what is done to it, for as long as it was asked for."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from tqdm import tqdm

from alignedserve.launch.ports import free_port
from benchmarks.footprint import Footprint
from benchmarks.rt_with_be.served import running
from benchmarks.soak.calls import Calls
from benchmarks.soak.chats import Chatter, Shared
from benchmarks.soak.faults import Fault, FaultLog
from benchmarks.soak.jobs import Jobs
from benchmarks.soak.plan import Episode, episodes
from benchmarks.soak.questions import Answer, Question
from benchmarks.soak.silences import TIERS, Silences
from benchmarks.soak.striker import NotWhole, Striker
from benchmarks.soak.tally import Tally
from benchmarks.soak.victims import Memory, memory_of, segments_beside

HOST = "127.0.0.1"
START_S, STOP_S, IDLE_S = 240.0, 90.0, 60.0
# without faults, so that processes have what they need for their work when memory is first looked at
WARM_S = 6.0
# Whatever happens: of a client's last stream, of the last job and its files, and of the last fault.
MAX_AFTER_S = 900.0
COMMON_ROLES = ("router", "kvpool", "gateway", "store")


@dataclass(frozen=True)
class Setup:
    seconds: float
    seed: int
    num_prefill: int = 1
    num_decode: int = 2
    # so many instances that do both, instead of those
    num_colocated: int = 0
    num_chats: int = 6

    @property
    def roles(self) -> tuple[str, ...]:
        return COMMON_ROLES + (("colocated",) if self.num_colocated else ("prefill", "decode"))

    @property
    def instance_ids(self) -> list[str]:
        counts = {"prefill": self.num_prefill, "decode": self.num_decode}
        if self.num_colocated:
            counts = {"colocated": self.num_colocated}
        numbered = [f"{role}-{number}" for role, count in counts.items() for number in range(count)]
        return ["router", "kvpool-0", "gateway-0", *numbered]

    @property
    def options(self) -> list[str]:
        if self.num_colocated:
            return ["--colocated-instances", str(self.num_colocated)]
        return ["--prefill-instances", str(self.num_prefill), "--decode-instances", str(self.num_decode)]


@dataclass
class Outcome:
    faults: list[Fault] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    memory_before: list[Memory] = field(default_factory=list)
    memory_after: list[Memory] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Served:
    process: subprocess.Popen[bytes]
    url: str
    log: Path


@contextmanager
def serving(setup: Setup) -> Iterator[Served]:
    port = free_port(HOST)
    # a socket's path must be short
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp", ignore_cleanup_errors=True) as name:
        own = ["--host", HOST, "--port", str(port), "--shutdown-timeout", "5", "--log-level", "warning"]
        own += ["--state-dir", f"{name}/state", "--cost-profile", f"{name}/profile"]
        command = [sys.executable, "-m", "alignedserve", "serve", "--dtype", "float32", *own, *setup.options]
        log = Path(name) / "log"
        with running(command, log, "ready after", START_S) as process:
            yield Served(process, f"http://{HOST}:{port}", log)


class Soak:
    def __init__(
        self, setup: Setup, served: Served, asked: Sequence[tuple[Question, Answer]], bar: tqdm[None]
    ) -> None:
        self.outcome = Outcome()
        self._setup = setup
        self._served = served
        self._bar = bar
        self._pid = served.process.pid
        self._footprint = Footprint(self._pid)
        self._log, self._silences, self._stop = FaultLog(), Silences(), asyncio.Event()
        self._asked = asked

    def run(self) -> None:
        """With the server's end, and what it leaves."""
        try:
            asyncio.run(self._run())
        finally:
            self.outcome.faults = self._log.faults
            self.outcome.wrong += self.outcome.tally.wrong
        self._footprint.note()
        self._served.process.send_signal(signal.SIGTERM)
        try:
            status = self._served.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.outcome.wrong.append(f"the server has not ended {STOP_S:g} s after SIGTERM")
            return
        if status != 0:
            self.outcome.wrong.append(f"the server ended with status {status}")
        if left := self._footprint.left():
            self.outcome.wrong.append(f"left behind: {left}")

    async def _run(self) -> None:
        tally, setup = self.outcome.tally, self._setup
        calls = Calls(self._served.url, self._log, tally)
        jobs = Jobs(calls, self._asked, self._log, tally, setup.seed)
        shared = Shared(self._served.url, self._asked, self._log, tally, self._silences, self._stop)
        chatters = [Chatter(shared, tier, n, setup.seed) for tier in TIERS for n in range(setup.num_chats)]
        striker = Striker(self._pid, self._served.url, setup.instance_ids)
        using = asyncio.gather(jobs.run(self._stop), *(each.run() for each in chatters))
        try:
            async with asyncio.timeout(setup.seconds + MAX_AFTER_S):
                await self._strike(striker)
                self._stop.set()
                self._bar.set_description("waiting for the last streams and lines")
                await using
                await jobs.audit()
                await self._check_idle()
        except NotWhole as error:
            self.outcome.wrong.append(f"{error}; its last words: {_last_words(self._served.log)}")
        except TimeoutError:
            self.outcome.wrong.append(f"not over {MAX_AFTER_S:g} s after the last minute")
        finally:
            using.cancel()
            await asyncio.gather(using, return_exceptions=True)
            await striker.close()
            await calls.close()

    # ---- faults ------------------------------------------------------------------------------------------------------

    async def _strike(self, striker: Striker) -> None:
        end_s = time.monotonic() + self._setup.seconds
        await self._pause(WARM_S)
        self.outcome.memory_before = memory_of(self._pid)
        for episode in episodes(self._setup.seed, self._setup.roles):
            await self._pause(episode.pause_s)
            self._end_fault()
            if time.monotonic() > end_s:
                return
            await self._carry_out(striker, episode)

    async def _carry_out(self, striker: Striker, episode: Episode) -> None:
        self._bar.set_description(f"{episode}; {self.outcome.tally}")
        self._footprint.note()
        now = time.monotonic()
        fault = self._log.add(episode, now)
        fault.num_lost = -self.outcome.tally.num_lost
        self._silences.begin(now)
        await striker.carry_out(episode)
        fault.whole_s = time.monotonic()
        self._bar.update(round(fault.whole_s - now, 1))

    def _end_fault(self) -> None:
        """Silences go on for a while after everything is up again."""
        for fault in self._log.faults[-1:]:
            fault.silence = self._silences.end(time.monotonic())
            fault.num_lost += self.outcome.tally.num_lost

    async def _pause(self, seconds: float) -> None:
        self._bar.set_description(f"no fault; {self.outcome.tally}")
        await asyncio.sleep(seconds)
        self._bar.update(round(seconds, 1))

    # ---- the end -----------------------------------------------------------------------------------------------------

    async def _check_idle(self) -> None:
        async with httpx.AsyncClient(base_url=self._served.url, timeout=30) as http:
            give_up_s = time.monotonic() + IDLE_S
            while left := await self._left(http):
                if time.monotonic() > give_up_s:
                    self.outcome.wrong.append(f"left after all requests: {left}")
                    break
                await asyncio.sleep(0.2)
        self.outcome.memory_after = memory_of(self._pid)

    async def _left(self, http: httpx.AsyncClient) -> str:
        """Of requests, anywhere; empty: nothing."""
        cluster = (await http.get("/v1/cluster")).json()
        used = {
            each["instance_id"]: each["blocks"]["used"]
            for each in cluster.get("processes", [])
            if each["state"] != "up" or each["blocks"]["used"] or sum(each["requests"].values())
        }
        if used or cluster.get("requests", {"?": 1}):
            return f"{used or ''} {cluster.get('requests')}"
        metrics = (await http.get("/metrics")).text
        open_ones = [line for line in metrics.splitlines() if _is_open(line)]
        self._footprint.note()
        segments = segments_beside(self._footprint.paths)
        if len(segments) != 1:
            return f"shared memory of pools that died: {sorted(map(str, segments))}"
        return "; ".join(open_ones)


def _last_words(log: Path) -> str:
    return " / ".join(log.read_text(errors="replace").splitlines()[-3:])


def _is_open(line: str) -> bool:
    """A metric of requests or jobs that are under way, and are not 0."""
    names = ("num_requests_running", "num_requests_waiting", "batch_jobs")
    return line.startswith(tuple(f"alignedserve:{name}" for name in names)) and float(line.split()[-1]) != 0
