"""The live side: profiles a server, sends it the requests, and reads what its router and the client saw."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from alignedserve.bench.client import Client, RequestOutcome
from alignedserve.bench.workload import Item
from alignedserve.instance.profile.saved import Profile, decode
from alignedserve.router.eventlog import LogReader
from alignedserve.sim.trace import Arrival
from alignedserve.sim.world import Overhead
from benchmarks.rt_with_be.served import NUM_SLOTS, serving
from benchmarks.rt_with_be.traffic import ask
from benchmarks.sim_vs_live.figures import Door, Figures, Side, figures_of
from benchmarks.sim_vs_live.model import Served
from benchmarks.sim_vs_live.requests import MAX_TOKENS, Asked

POOL_BYTES = 256 << 20
OPTIONS = (
    *("--colocated-instances", "1", "--pool-memory-bytes", str(POOL_BYTES)),
    # Each request states the length of its answer.
    *("--length-predictor", "none"),
)


@dataclass(frozen=True)
class Live:
    # At the router and at the client.
    side: Side
    client: Figures
    # All requests as they arrived at the router, including those before the counted ones.
    arrivals: list[Arrival]
    profile: Profile
    # The corrections of the instance's predictions just before the counted requests.
    overhead: Overhead


class Asking(Client):
    """Sends each request with its class and objectives, and has every token returned as text."""

    def _body(self, item: Item) -> dict[str, Any]:
        body = super()._body(item) | {"ignore_eos": True, "skip_special_tokens": False}
        if item.tier == "be":
            return body | {"service_tier": "flex"}
        assert isinstance(item, Asked) and item.tbt_s is not None
        return body | {"slo": {"ttft_ms": 1e3 * item.ttft_s, "tbt_ms": 1e3 * item.tbt_s}}


@dataclass(frozen=True)
class Plan:
    """The requests to a live server, one list after the other."""

    # Real time that never overlaps. Messages are measured by it.
    alone: Sequence[Asked]
    # These measure how much longer than their profile iterations take.
    warming: Sequence[Asked]
    counting: Sequence[Asked]


def measure(policy: str, model: Served, kv_bytes: int, profile_s: float, plan: Plan) -> Live:
    """Raises RuntimeError if the server does not start or a request is not answered."""
    sizes = ("--max-model-len", str(MAX_TOKENS), "--kv-cache-memory-bytes", str(kv_bytes))
    with tempfile.TemporaryDirectory(prefix="sim-vs-live-", dir="/tmp") as folder:
        path, events = Path(folder) / "profile.json", Path(folder) / "events"
        make_profile(path, profile_s, *model.options, *sizes)
        kept = ("--cost-profile", str(path), "--event-log", str(events))
        with serving(
            policy, *model.options, "--served-model-name", "demo", *sizes, *OPTIONS, *kept
        ) as served:
            ask(served.url, plan.alone, {}, Asking)
            ask(served.url, plan.warming, {}, Asking)
            outcomes, _ = ask(served.url, plan.counting, {}, Asking)
        door = read(events)
        profile = decode(path.read_bytes(), str(path))
    count = len(plan.counting)
    begin_s = min(door.arrived_s[key] for key in door.last_to_come(count))
    return Live(
        door.side(count),
        seen(outcomes, plan.counting),
        door.arrivals(door.last_to_come(len(plan.warming) + count)),
        profile,
        overhead_before(door, begin_s, len(plan.alone)),
    )


def make_profile(path: Path, seconds: float, *sizes: str, num_threads: int | None = None) -> None:
    """`num_threads`: those of the engine; None: one for each core."""
    command = [sys.executable, "-m", "alignedserve", "profile", "--device", "cpu", "--no-use-tqdm"]
    own = ["--max-num-seqs", str(NUM_SLOTS), "--seconds", str(seconds), "--out", str(path)]
    environment = os.environ | ({"OMP_NUM_THREADS": str(num_threads)} if num_threads else {})
    done = subprocess.run([*command, *own, *sizes], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"no profile: {done.stderr[-1000:]}")


def read(events: Path) -> Door:
    door = Door()
    for path in sorted(events.iterdir()):
        for step in LogReader(path).steps():
            door(step.now, step.event, step.orders or [])
    return door


def overhead_before(door: Door, begin_s: float, num_alone: int) -> Overhead:
    """Returns the medians of the instance's reports until then, and the variation of iterations. The first `num_alone`
    requests ran alone; the instance's corrections from them precede the others."""
    first_s = sorted(door.arrived_s.values())[num_alone]
    reports = [each for now, each in door.reports if first_s < now < begin_s and each.num_computed]
    decodes = [each for each in reports if each.num_computed == sum(len(news.tokens) for news in each.news)]
    chunks = [each for each in reports if each.num_computed > sum(len(news.tokens) for news in each.news)]
    return Overhead(
        median(each.pace for each in reports),
        median(each.outside_s for each in reports),
        median(door.messages_s()[:num_alone]) / 2,
        tuple(each.overrun for each in decodes),
        tuple(each.overrun for each in chunks),
    )


def seen(outcomes: Sequence[RequestOutcome], asked: Sequence[Asked]) -> Figures:
    for outcome, each in zip(outcomes, asked, strict=True):
        if outcome.error is not None:
            raise RuntimeError(f"request due at {outcome.due_s:.2f} s: {outcome.error}")
        if (outcome.prompt_len, outcome.output_len) != (each.prompt_len, each.max_tokens):
            raise RuntimeError(f"{outcome.prompt_len} and {outcome.output_len} tokens, not those of {each}")
    rt = [each for each in outcomes if each.tier == "rt"]
    ends_s = max(each.times_s[-1] for each in outcomes)
    num_tokens = sum(each.output_len for each in outcomes)
    waits_s = [each.times_s[0] - each.due_s for each in rt]
    return figures_of(waits_s, [each.times_s for each in rt], num_tokens, ends_s - outcomes[0].due_s)
