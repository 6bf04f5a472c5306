"""A workload on an island with given hardware and policy. `alignedserve simulate` compares several (cli/simulate)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import inf

from alignedserve.kv.format import num_restored_blocks
from alignedserve.kv.groups import LayerGroups, one_group
from alignedserve.kv.span import KvSpan
from alignedserve.protocol.messages import InstanceLimits, Request
from alignedserve.sim.gateway import Stream
from alignedserve.sim.island import IslandConfig, IslandSettings, SimIsland
from alignedserve.sim.lifetime import Lifetimes
from alignedserve.sim.model import make_request, prompt_of
from alignedserve.sim.pauses import Pauses
from alignedserve.sim.report import Objectives, Report, make_report
from alignedserve.sim.trace import Arrival, Lengths
from alignedserve.types import RequestKey

# Seconds of virtual time without progress after which a request counts as stuck.
STUCK_S = 3600.0


@dataclass(frozen=True)
class Scenario(IslandSettings):
    """Instances have the blocks for which the cost model has memory."""

    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 16_384
    # Bytes of host memory that hold KV.
    pool_bytes: float = 256e9
    slo: Objectives = field(default_factory=Objectives)
    # Whether colocated instances may keep inputs of layers in place of KV.
    hidden_cache: bool = False
    # The model's layers, if an instance holds blocks of some only for a window.
    groups: LayerGroups = field(default_factory=lambda: one_group(1))

    def island(self) -> SimIsland:
        span = self.span
        num_blocks = self.cost.num_kv_tokens // self.block_size * span.num_groups
        longest = -(-self.max_model_len // self.block_size)
        limits = InstanceLimits(
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            max_restored_blocks=num_restored_blocks(num_blocks, longest) if self.hidden_cache else 0,
            window=span.window,
            num_full_groups=span.num_full_groups,
            num_sliding_groups=span.num_sliding_groups,
            tile_tokens=span.tile_tokens,
            has_state=span.has_state,
        )
        config = IslandConfig(
            **{each.name: getattr(self, each.name) for each in fields(IslandSettings)},
            prefill=limits,
            decode=limits,
            pool_blocks=int(self.pool_bytes / (self.block_size * self.cost.pool_bytes_per_token)),
        )
        return SimIsland(config)

    @property
    def span(self) -> KvSpan:
        if self.groups.window >= self.max_model_len and not self.groups.has_state:
            return KvSpan(self.block_size)
        return KvSpan.of(self.groups, self.block_size, max_step=0)

    @property
    def num_decoding(self) -> int:
        """The number of instances that decode."""
        return self.num_colocated or self.num_decode

    def requests(self, workload: Sequence[Arrival]) -> list[Request]:
        """Returns the requests that fit the model."""
        fitting = [arrival for arrival in workload if self.fits(arrival.lengths)]
        return [self.request(index, arrival) for index, arrival in enumerate(fitting, start=1)]

    def fits(self, lengths: Lengths) -> bool:
        return lengths.prompt + lengths.output <= self.max_model_len

    def request(self, key: int, arrival: Arrival) -> Request:
        """Returns the request. Real time has the SLO, or its own objectives; best effort has its window."""
        is_rt, window_s, lengths = arrival.tier == "rt", arrival.window_s, arrival.lengths
        ttft_s = self.slo.ttft_s if arrival.ttft_s is None else arrival.ttft_s
        tbt_s = self.slo.tpot_s if arrival.tbt_s is None else arrival.tbt_s
        return make_request(
            key=key,
            prompt_len=lengths.prompt,
            num_output_tokens=lengths.output,
            arrival_s=arrival.time_s,
            ttft_s=ttft_s if is_rt and ttft_s < inf else None,
            tbt_s=tbt_s if is_rt and tbt_s < inf else None,
            tier=arrival.tier,
            deadline_s=None if is_rt or window_s is None else arrival.time_s + window_s,
            prompt=prompt_of(key, lengths.prompt, arrival.hash_ids) if self.enable_prefix_caching else None,
        )

    def run(self, workload: Sequence[Arrival]) -> Report:
        ran = self.simulate(workload)
        return make_report(ran.streams, ran.lifetimes, self.slo)

    def simulate(self, workload: Sequence[Arrival], until_s: float | None = None) -> Ran:
        """Runs until all requests have ended, and then checks that nothing is left; or until `until_s`, whatever is
        still open."""
        island, lifetimes, pauses = self.island(), Lifetimes(), Pauses(self.span)
        requests = self.requests(workload)
        island.router.observers += [lifetimes, pauses]
        island.submit(requests)
        island.start()
        if until_s is None:
            self._finish(island, len(requests), requests[-1].arrival_s + STUCK_S)
        else:
            island.run(until_s)
        core = island.router.core
        num_role_changes = core.state.counters.role_changes.total() if core else 0
        return Ran(self, island.streams, lifetimes, pauses, island.world.computed, num_role_changes)

    @staticmethod
    def _finish(island: SimIsland, num_requests: int, limit_s: float) -> None:
        if not island.run_until_done(num_requests, limit_s):
            raise RuntimeError(f"{island.num_open} of {num_requests} requests are still open at {limit_s} s")
        island.settle()
        island.check_idle()


@dataclass(frozen=True)
class Ran:
    """The results of a simulation."""

    scenario: Scenario
    streams: list[Stream]
    lifetimes: Lifetimes
    pauses: Pauses
    # For each request, the tokens that were computed for it.
    computed: Counter[RequestKey]
    num_role_changes: int = 0
