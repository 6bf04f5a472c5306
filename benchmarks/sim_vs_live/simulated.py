"""The simulated side: the same requests on an island with the live one's measurements."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from alignedserve.protocol.messages import Request
from alignedserve.sampling_params import SamplingParams
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.island import SimIsland
from alignedserve.sim.report import Objectives
from alignedserve.sim.scenario import STUCK_S, Scenario
from alignedserve.sim.trace import Arrival
from alignedserve.sim.world import Overhead
from alignedserve.timing.cost import CostModel
from benchmarks.arena.fitting import Layout
from benchmarks.rt_with_be.served import NUM_SLOTS
from benchmarks.sim_vs_live.figures import Door, Side
from benchmarks.sim_vs_live.live import POOL_BYTES
from benchmarks.sim_vs_live.requests import MAX_TOKENS, TTFT_S

ONE_COLOCATED = Layout(0, 0, 1)


def simulate(
    policy: str, cost: CostModel, kv_bytes: int, overhead: Overhead, arrivals: Sequence[Arrival], count: int
) -> Side:
    """Returns the results of the last `count` requests. The earlier ones bring the instance and its policy to the same
    state as live. They are over when the others begin, as live."""
    held = replace(cost, num_kv_tokens=kv_bytes // cost.kv_bytes_per_token)
    return played(scenario_of(policy, held, overhead, TTFT_S), arrivals, count).side(count)


def scenario_of(
    policy: str, cost: CostModel, overhead: Overhead, ttft_s: float, layout: Layout = ONE_COLOCATED
) -> Scenario:
    return Scenario(
        cost,
        num_prefill=layout.num_prefill,
        num_decode=layout.num_decode,
        num_colocated=layout.num_colocated,
        max_num_seqs=NUM_SLOTS,
        max_model_len=MAX_TOKENS,
        pool_bytes=POOL_BYTES,
        slo=Objectives(ttft_s),
        scheduling=SchedulingConfig(policy),
        overhead=overhead,
        is_checked=False,
    )


def played(scenario: Scenario, arrivals: Sequence[Arrival], count: int) -> Door:
    """Returns what the simulated router saw. The last `count` requests begin when the others are answered."""
    island, door = scenario.island(), Door()
    island.router.observers.append(door)
    requests = [_limited(*each) for each in zip(scenario.requests(arrivals), arrivals, strict=True)]
    island.start()
    for part in (requests[:-count], requests[-count:]):
        if part:
            _answer(island, part)
    if refused := [str(stream.outcome) for stream in island.streams if not stream.is_complete]:
        reasons = ", ".join(sorted({*refused}))
        raise RuntimeError(f"{len(refused)} of {len(requests)} requests were refused: {reasons}")
    return door


def _answer(island: SimIsland, requests: Sequence[Request]) -> None:
    """Submits the requests so that the first one arrives now, and runs until all are answered."""
    now, first_s = island.now, requests[0].arrival_s
    # Differences first: a sum with `now - first_s` may be rounded to before now.
    island.submit([replace(each, arrival_s=now + (each.arrival_s - first_s)) for each in requests])
    if not island.run_until_done(len(island.streams) + len(requests), STUCK_S):
        raise RuntimeError(f"{island.num_open} of {len(requests)} requests are still open")


def _limited(request: Request, arrival: Arrival) -> Request:
    """Limits the answer. Live, each request states its number of tokens, and gets exactly that many."""
    return replace(request, params=SamplingParams(max_tokens=arrival.lengths.output))
