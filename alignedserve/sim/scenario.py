"""A workload on an island of given hardware and policy: the simulation that `alignedserve simulate` runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from alignedserve.cost import CostModel
from alignedserve.messages import InstanceLimits, Request
from alignedserve.sim.island import Island, IslandConfig
from alignedserve.sim.lifetime import Lifetimes
from alignedserve.sim.model import make_request
from alignedserve.sim.report import Report, Slo, make_report
from alignedserve.sim.trace import Arrival
from decode_worker.schedule import DecodeOptions
from router.config import RouterConfig

# a request that makes no progress for so long in virtual time is stuck
STUCK_S = 3600.0


@dataclass(frozen=True)
class Scenario:
    cost: CostModel
    router: RouterConfig = field(default_factory=RouterConfig)
    num_prefill: int = 1
    num_decode: int = 1
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 16_384
    # of host memory, for KV
    pool_bytes: float = 256e9
    slo: Slo = field(default_factory=Slo)
    decode_options: DecodeOptions = field(default_factory=DecodeOptions)

    def island(self) -> Island:
        limits = InstanceLimits(
            num_blocks=self.cost.num_kv_tokens // self.block_size,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )
        config = IslandConfig(
            cost=self.cost,
            prefill=limits,
            decode=limits,
            pool_blocks=int(self.pool_bytes / (self.block_size * self.cost.kv_bytes_per_token)),
            num_prefill=self.num_prefill,
            num_decode=self.num_decode,
            router=self.router,
            decode_options=self.decode_options,
        )
        return Island(config)

    def requests(self, workload: Sequence[Arrival]) -> list[Request]:
        """Those that fit the model."""
        fitting = [
            arrival
            for arrival in workload
            if arrival.lengths.prompt + arrival.lengths.output <= self.max_model_len
        ]
        return [
            make_request(
                key=index,
                prompt_len=arrival.lengths.prompt,
                num_output_tokens=arrival.lengths.output,
                arrival_s=arrival.time_s,
                ttft_s=self.slo.ttft_s,
                tbt_s=self.slo.tpot_s,
            )
            for index, arrival in enumerate(fitting, start=1)
        ]

    def run(self, workload: Sequence[Arrival]) -> Report:
        """Until all have ended, and then that nothing is left."""
        island, lifetimes, requests = self.island(), Lifetimes(), self.requests(workload)
        island.router.observers.append(lifetimes)
        island.submit(requests)
        island.start()
        limit_s = requests[-1].arrival_s + STUCK_S
        if not island.run_until_done(len(requests), limit_s):
            raise RuntimeError(f"{island.num_open} of {len(requests)} requests are still open at {limit_s} s")
        island.settle()
        island.check_idle()
        return make_report(island.streams, lifetimes, self.slo)
