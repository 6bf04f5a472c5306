"""The whole run: a server, its clients, and its faults, for the requested time."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from benchmarks.footprint import Footprint
from benchmarks.soak.calls import Calls
from benchmarks.soak.chats import Chatter, Shared
from benchmarks.soak.faults import Fault, FaultLog
from benchmarks.soak.idle import left_of_requests
from benchmarks.soak.jobs import Jobs
from benchmarks.soak.plan import Episode, episodes
from benchmarks.soak.questions import Answer, Question
from benchmarks.soak.served import Served, Setup
from benchmarks.soak.silences import TIERS, Silences
from benchmarks.soak.striker import NotWhole, Striker
from benchmarks.soak.tally import Tally
from benchmarks.soak.victims import Memory, memory_of

STOP_S = 90.0
# Seconds without faults, so that processes have allocated their usual memory when it is first measured.
WARM_S = 6.0
# Upper limit in seconds for the last streams, the last job with its files, and the last fault.
MAX_AFTER_S = 900.0


@dataclass
class Outcome:
    faults: list[Fault] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    memory_before: list[Memory] = field(default_factory=list)
    memory_after: list[Memory] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Soak:
    def __init__(
        self,
        setup: Setup,
        served: Served,
        asked: Sequence[tuple[Question, Answer]],
        bar: tqdm[None],
        plan: Iterable[Episode] | None = None,
    ) -> None:
        """`plan`: the faults; None takes the seed's until the time is over."""
        self.outcome = Outcome()
        self._setup = setup
        self._plan = episodes(setup.seed, setup.roles) if plan is None else plan
        self._served = served
        self._bar = bar
        self._pid = served.process.pid
        self._footprint = Footprint(self._pid)
        self._log, self._silences, self._stop = FaultLog(setup.grace_s), Silences(), asyncio.Event()
        self.outcome.faults = self._log.faults
        self._asked = asked
        self._num_lost_before = 0

    def run(self) -> None:
        """Runs everything, including the server's end and the check for leftovers."""
        try:
            asyncio.run(self._run())
        finally:
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
        clients = [jobs.run(self._stop), *(each.run() for each in chatters)]
        using = asyncio.gather(*clients, return_exceptions=True)
        try:
            async with asyncio.timeout(setup.seconds + MAX_AFTER_S):
                await self._strike(striker)
                self._stop.set()
                self._bar.set_description("waiting for the last streams and lines")
                self.outcome.wrong += [f"a client ended with {error!r}" for error in await using if error]
                await jobs.audit()
                if left := await left_of_requests(self._served.url, self._footprint):
                    self.outcome.wrong.append(f"left after all requests: {left}")
                self.outcome.memory_after = memory_of(self._pid)
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
        for episode in self._plan:
            await self._pause(episode.pause_s)
            self._end_fault()
            if time.monotonic() > end_s:
                return
            await self._carry_out(striker, episode)
        self._end_fault()

    async def _carry_out(self, striker: Striker, episode: Episode) -> None:
        self._bar.set_description(f"{episode}; {self.outcome.tally}")
        self._footprint.note()
        now = time.monotonic()
        fault = self._log.add(episode, now)
        self._num_lost_before = self.outcome.tally.num_lost
        self._silences.begin(now)
        await striker.carry_out(episode)
        fault.whole_s = time.monotonic()
        self._bar.update(round(fault.whole_s - now, 1))

    def _end_fault(self) -> None:
        """Ends the last fault's records. Silences continue for a while after everything is up again."""
        for fault in self._log.faults[-1:]:
            fault.silence = self._silences.end(time.monotonic())
            fault.num_lost = self.outcome.tally.num_lost - self._num_lost_before

    async def _pause(self, seconds: float) -> None:
        self._bar.set_description(f"no fault; {self.outcome.tally}")
        await asyncio.sleep(seconds)
        self._bar.update(round(seconds, 1))


def _last_words(log: Path) -> str:
    return " / ".join(log.read_text(errors="replace").splitlines()[-3:])
