"""A scenario live, and the same in virtual time."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from alignedserve.sim.world import Overhead
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.timing.cost import CostModel
from benchmarks.arena.fitting import Layout
from benchmarks.arena_live.scenes import Scene, count_left_out, requests_of
from benchmarks.arena_live.scores import Score, score
from benchmarks.rt_with_be.served import serving
from benchmarks.rt_with_be.traffic import ask
from benchmarks.sim_vs_live.figures import Door
from benchmarks.sim_vs_live.live import POOL_BYTES, Asking, make_profile, overhead_before, read
from benchmarks.sim_vs_live.model import Served
from benchmarks.sim_vs_live.requests import MAX_TOKENS, Asked, alone, fixed_list
from benchmarks.sim_vs_live.simulated import played, scenario_of

# Tokens of KV of an instance.
KV_TOKENS = 1 << 14
NUM_ALONE, NUM_WARMING = 6, 16


@dataclass(frozen=True)
class Both:
    live: Score
    simulated: Score
    num_requests: int
    pace: float
    # Requests of real time that would have come after the end.
    num_left_out: int


@dataclass(frozen=True)
class Machine:
    model: Served
    tokenizer: Tokenizer
    # By the number of threads of an instance
    profiles: dict[int, Path]
    costs: dict[int, CostModel]

    def cost(self, layout: Layout) -> CostModel:
        return replace(self.costs[threads_of(layout)], num_kv_tokens=KV_TOKENS)

    @property
    def options(self) -> Sequence[str]:
        kv_bytes = str(KV_TOKENS * self.model.kv_bytes_per_token)
        return "--max-model-len", str(MAX_TOKENS), "--kv-cache-memory-bytes", kv_bytes

    def warming(self, asked: Sequence[Asked]) -> tuple[list[Asked], list[Asked]]:
        """Requests before those that count: some that run alone, and some at about their rate."""
        model = self.model
        first = alone(self.tokenizer, NUM_ALONE, model.apart_s, max(model.tbt_s))
        late = [each for each in asked if each.due_s]
        rate = len(late) / late[-1].due_s if late else model.rates[0]
        # All of them only where nothing counts, to measure the pace.
        count = min(NUM_WARMING, len(asked) or NUM_WARMING)
        return first, fixed_list(self.tokenizer, rate, count, model.tbt_s, seed=1)


def threads_of(layout: Layout) -> int:
    return max(1, len(os.sched_getaffinity(0)) // sum(layout))


def profile(machine: Machine, num_threads: int, seconds: float, folder: Path) -> Path:
    path = folder / f"profile-{num_threads}.json"
    make_profile(path, seconds, *machine.model.options, *machine.options, num_threads=num_threads)
    return path


def pace_of(machine: Machine, layout: Layout) -> float:
    """Returns how much longer iterations take in a served system of this layout than by the profile. With prefill
    instances, it is theirs, which bind."""
    door, _ = _serve(machine, layout, "fcfs", [])
    ratios = prompt_ratios(door, machine.cost(layout), float("inf"))
    return median(ratios) if ratios else overhead_before(door, float("inf"), NUM_ALONE).pace


def prompt_ratios(door: Door, cost: CostModel, end_s: float) -> list[float]:
    """Returns the ratios of measured to predicted time of prefill instances' iterations until then. Prompts here are
    shorter than an iteration may be, so each is computed whole."""
    reports = [each for now, each in door.prefill_reports if now < end_s and each.num_computed]
    return [each.duration_s / cost.iteration([(0, each.num_computed)], []) for each in reports]


def overhead_of(door: Door, cost: CostModel, begin_s: float) -> Overhead:
    """Returns what the simulator is told, from the requests before the counted ones. All instances have one pace there,
    so what prefill instances take beyond it is in the ratios of iterations with prompts."""
    found = overhead_before(door, begin_s, NUM_ALONE)
    if ratios := prompt_ratios(door, cost, begin_s):
        return dataclasses.replace(found, overruns_of_chunks=tuple(each / found.pace for each in ratios))
    return found


def play(machine: Machine, scene: Scene, policy: str, pace: float, seconds: float) -> Both:
    """Raises RuntimeError if a server does not start or a request is not answered."""
    cost = machine.cost(scene.layout)
    asked = requests_of(scene, cost, pace, seconds, machine.tokenizer)
    ttft_s, count = asked[0].ttft_s, len(asked)
    door, num_warming = _serve(machine, scene.layout, policy, asked)
    begin_s = min(door.arrived_s[key] for key in door.last_to_come(count))
    overhead = overhead_of(door, cost, begin_s)
    arrivals = door.arrivals(door.last_to_come(num_warming + count))
    simulated = played(scenario_of(policy, cost, overhead, ttft_s, scene.layout), arrivals, count)
    return Both(
        score(door, count, ttft_s),
        score(simulated, count, ttft_s),
        count,
        overhead.pace,
        count_left_out(scene, cost, pace, seconds, machine.tokenizer),
    )


def _serve(machine: Machine, layout: Layout, policy: str, asked: Sequence[Asked]) -> tuple[Door, int]:
    """Returns what the router saw, and the number of requests between those that ran alone and those that count."""
    first, warming = machine.warming(asked)
    with tempfile.TemporaryDirectory(prefix="arena-live-", dir="/tmp") as folder:
        events = Path(folder) / "events"
        own = (
            *("--pool-memory-bytes", str(POOL_BYTES), "--length-predictor", "none"),
            *("--cost-profile", str(machine.profiles[threads_of(layout)]), "--event-log", str(events)),
            *_instances(layout),
        )
        named = ("--served-model-name", "demo")
        with serving(policy, *machine.model.options, *named, *machine.options, *own) as served:
            for part in (first, warming, asked):
                if part:
                    for outcome in ask(served.url, part, {}, Asking)[0]:
                        if outcome.error is not None:
                            raise RuntimeError(f"request due at {outcome.due_s:.2f} s: {outcome.error}")
        return read(events), len(warming)


def _instances(layout: Layout) -> Sequence[str]:
    if layout.num_colocated:
        return "--colocated-instances", str(layout.num_colocated)
    prefill, decode = str(layout.num_prefill), str(layout.num_decode)
    return "--prefill-instances", prefill, "--decode-instances", decode
