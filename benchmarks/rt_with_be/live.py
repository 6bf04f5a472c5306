"""The live parts: one server per policy, one after the other, in which all cases of a round run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2

from alignedserve.bench.client import RequestOutcome
from alignedserve.router.eventlog import replay
from alignedserve.sim.pauses import Pauses
from benchmarks.rt_with_be import peer
from benchmarks.rt_with_be.arithmetic import (
    Case,
    Row,
    difference,
    num_different,
    num_needed,
    objectives_s,
    real_time,
)
from benchmarks.rt_with_be.served import (
    NUM_SLOTS,
    OPTIONS,
    BestEffort,
    Counters,
    Served,
    Server,
    kv_options,
    serving,
)
from benchmarks.rt_with_be.traffic import DEMO, Traffic, chats, lines

PLACE = "1+1"
BURST_CV = 5.0
# Room for the KV of more than can run, and of more than can wait.
ROOMY = kv_options(512 << 20, 1 << 30)
# Room for less than half of the slots, so that running requests must leave now and then.
TIGHT = kv_options(24 << 20, 1 << 30)
FILL_S = 60.0
# Answered lines after which best effort counts as steady.
NUM_DONE = 16
NUM_WARMING = 4
LOOK_S = 0.1


@dataclass(frozen=True)
class Live:
    # RT requests per second.
    rt_rate: float = 2.0
    window_s: float = 16.0
    # Lines of the batch job.
    num_lines: int = 1500
    seed: int = 0
    # A Python with vLLM, for the peer's policies.
    vllm_python: Path | None = None
    # Colocated instances, in place of one of each role.
    num_colocated: int = 0
    # Options of `serve`, in place of those for the demo model on a CPU.
    usual: Sequence[str] = OPTIONS
    traffic: Traffic = DEMO
    num_slots: int = NUM_SLOTS
    # Whether one piece may carry several tokens, as from a server that produces a thousand per second.
    may_join: bool = False

    # ---- parts ------------------------------------------------------------------------------------------------------

    def rounds(
        self, policies: Sequence[str], num_rounds: int, slo_s: tuple[float, float] | None
    ) -> Iterator[Row]:
        for number in range(num_rounds):
            for policy in policies:
                head = {"part": "live", "place": self._place(policy), "policy": policy, "round": number}
                yield from tried(head, self._served_cases(policy, slo_s, cv=1.0))

    def bursts(self, policies: Sequence[str], slo_s: tuple[float, float] | None) -> Iterator[Row]:
        """Jobs have no windows here, because the API's shortest one is too long."""
        for policy in policies:
            head = {"part": "live_bursts", "place": self._place(policy), "policy": policy, "round": 0}
            yield from tried(head, self._served_cases(policy, slo_s, cv=BURST_CV))

    def exact(self, policies: Sequence[str]) -> Iterator[Row]:
        for policy in policies:
            yield from tried(
                {"part": "live_exact", "place": self._place(policy), "policy": policy},
                self._served_exact(policy),
            )

    def _served_exact(self, policy: str) -> Iterator[Row]:
        with tempfile.TemporaryDirectory(prefix="events-", dir="/tmp") as events:
            with serving(policy, *TIGHT, *self._instances, "--event-log", events) as served:
                row = replace(self, num_lines=3 * NUM_SLOTS)._exact(served)
            pauses = _pauses(Path(events))
        yield row | {
            "num_evicted": len(pauses.evicted),
            "num_sat_out": len(pauses.sat_out),
            "num_interrupted": len(pauses.interrupted),
        }

    def _served_cases(self, policy: str, slo_s: tuple[float, float] | None, cv: float) -> Iterator[Row]:
        with self._serving(policy) as server:
            yield from self.cases(server, slo_s, cv)

    def _serving(self, policy: str) -> AbstractContextManager[Server]:
        if policy in peer.POLICIES and self.vllm_python:
            return peer.serving(self.vllm_python, peer.POLICIES[policy])
        roomy = ROOMY if self.usual is OPTIONS else ()
        return serving(policy, *roomy, *self._instances, usual=self.usual)

    @property
    def _instances(self) -> Sequence[str]:
        return ("--colocated-instances", str(self.num_colocated)) if self.num_colocated else ()

    def _place(self, policy: str) -> str:
        if policy in peer.POLICIES:
            return peer.PLACE
        return f"{self.num_colocated} colocated" if self.num_colocated else PLACE

    # ---- cases ------------------------------------------------------------------------------------------------------

    def cases(self, server: Server, slo_s: tuple[float, float] | None, cv: float) -> Iterator[Row]:
        """Yields the cases: BE alone on a server without any RT so far; RT alone; both."""
        job = server.start(self.traffic.lines(self.num_lines))
        until_steady(job)
        before, begun_s = server.counters(), time.monotonic()
        time.sleep(self.window_s)
        during, waited_s = server.counters() - before, time.monotonic() - begun_s
        job.cancel()
        yield {"case": "be"} | _best_effort(during, waited_s).as_row()

        items = self.traffic.chats(self.rt_rate, self.window_s, cv, self.seed)
        warming = self.traffic.chats(NUM_WARMING, 1.0, 1.0, 1)
        server.ask(warming, None)
        before = server.counters()
        outcomes, took_s = server.ask(items, None)
        rt = replace(
            real_time(outcomes, None, took_s, self.may_join), busy=_busy(server.counters() - before, took_s)
        )
        alone = texts(outcomes)
        yield {"case": "rt"} | rt.as_row()

        slo_s = slo_s or objectives_s(rt)
        job = server.start(self.traffic.lines(self.num_lines))
        until_steady(job)
        # Exposes the steady rate's objectives before they are measured.
        server.ask(warming, slo_s)
        before = server.counters()
        outcomes, took_s = server.ask(items, slo_s)
        during = server.counters() - before
        be, num_left = _best_effort(during, took_s), _num_left(job)
        if num_left <= self.num_slots:
            raise RuntimeError(f"{num_left} lines of {self.num_lines} are left: best effort has run out")
        mix = replace(
            real_time(outcomes, slo_s, took_s, self.may_join),
            be_tokens_per_s=be.be_tokens_per_s,
            busy=be.busy,
        )
        yield (
            {"case": "mix"}
            | mix.as_row()
            | {
                "slo_ttft_s": slo_s[0],
                "slo_tbt_s": slo_s[1],
                "num_evicted": during.num_evicted,
                "num_different": num_different(alone, texts(outcomes)),
                "be_lines_left": num_left,
            }
        )
        job.cancel()

    def _exact(self, served: Served) -> Row:
        """Runs the same job twice to its end: alone, and with RT beside it for as long as it takes."""
        asked = lines(self.num_lines)
        items = chats(self.rt_rate, self.window_s, 1.0, self.seed)
        rt_alone, _ = served.ask(items, None)
        be_alone = served.start(asked).answers()
        before = served.metrics()
        job = served.start(asked)
        until_steady(job)
        rt_beside, _ = served.ask(items, objectives_s(real_time(rt_alone, None, 1.0)))
        be_beside = job.answers()
        after = served.metrics()
        needed = [num_needed(each["prompt_len"], each["output_len"]) for each in be_beside.values()]
        needed += [num_needed(each.prompt_len, each.output_len) for each in rt_beside]
        return {
            "num_computed": difference(before, after, "computed_tokens_total"),
            "num_needed": sum(needed),
            "num_different": num_different(be_alone, be_beside)
            + num_different(texts(rt_alone), texts(rt_beside)),
        }


def tried(head: Row, rows: Iterator[Row]) -> Iterator[Row]:
    """Yields an error as a row, so that the next policy can continue."""
    try:
        for row in rows:
            yield head | row
    except (RuntimeError, KeyError, httpx2.HTTPError) as error:
        yield head | {"error": f"{type(error).__name__}: {error}"}


def until_steady(job: BestEffort) -> None:
    """Waits until best effort has filled the available room and the first lines have made room for others."""
    deadline = time.monotonic() + FILL_S
    while job.counts()["completed"] < NUM_DONE:
        if time.monotonic() > deadline:
            raise RuntimeError(f"after {FILL_S} s fewer than {NUM_DONE} lines are answered: {job.counts()}")
        time.sleep(LOOK_S)


def texts(outcomes: Sequence[RequestOutcome]) -> dict[str, str]:
    return {str(number): outcome.text for number, outcome in enumerate(outcomes)}


def _num_left(job: BestEffort) -> int:
    counts = job.counts()
    return counts["total"] - counts["completed"] - counts["failed"]


def _best_effort(during: Counters, seconds: float) -> Case:
    return Case(
        rt_tokens_per_s=during.rt_tokens / seconds,
        be_tokens_per_s=during.be_tokens / seconds,
        busy=_busy(during, seconds),
    )


def _busy(during: Counters, seconds: float) -> float:
    return min(during.computing_s / seconds, 1.0)


def _pauses(events: Path) -> Pauses:
    pauses = Pauses()
    for path in sorted(events.iterdir()):
        for now, event, sends in replay(path):
            pauses(now, event, sends)
    return pauses
