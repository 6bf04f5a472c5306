"""An instance under a policy, in virtual time, with costs that can be reckoned in the head."""

from __future__ import annotations

import math

from msgspec.structs import replace

from alignedserve.decode_worker.plan import DecodePlan
from alignedserve.decode_worker.schedule import DecodeSchedule
from alignedserve.protocol.messages import InstanceLimits, Work
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import make_policy
from alignedserve.timing.cost import CopyChannel, CostModel, LinearCost
from alignedserve.timing.deadlines import Deadlines
from alignedserve.timing.estimate import Estimate
from alignedserve.types import RequestKey
from tests.sim.islands import COST
from tests.works import make_work

# An iteration takes 10 ms, and 1 ms for each decode and each token of a chunk; attention costs nothing. A token's KV
# comes from the pool in 1 ms.
PLAIN = replace(
    COST,
    prefill_fixed_s=0.01,
    prefill_token_s=0.001,
    prefill_attention_s=0.0,
    decode_attention_s=0.0,
    decode_lines=[LinearCost(0.01, 0.001)],
    channels=replace(COST.channels, fetch=CopyChannel(0.0, 1000.0 * COST.kv_bytes_per_token)),
)
LIMITS = InstanceLimits(
    num_blocks=200, block_size=16, max_num_seqs=40, max_num_batched_tokens=512, max_model_len=640
)


class Instance:
    """A colocated instance, at times that the test says."""

    def __init__(
        self,
        policy: str,
        limits: InstanceLimits = LIMITS,
        cost: CostModel | None = PLAIN,
        preemption_mode: str = "swap",
        max_parts: int = 0,
        evict_ahead: int = 1,
        admit_ahead: int | None = 1,
    ) -> None:
        """`max_parts`: of how many blocks host memory has room for what is overwritten; 0: blocks are not shared."""
        estimate = Estimate(cost) if cost else None
        config = SchedulingConfig(
            policy,
            evict_ahead=evict_ahead,
            admit_ahead=admit_ahead,
            preemption_mode=preemption_mode,
            share_blocks=max_parts > 0,
        )
        part = make_policy(config).colocated(limits, estimate)
        self.schedule = DecodeSchedule(limits, part, estimate, max_parts=max_parts)

    def runs(self, *works: Work, now: float = 0.0) -> None:
        """They decode from here on."""
        for work in works:
            self.schedule.offer([work], is_batch=False)
            (pull,) = self.schedule.plan(now).pulls
            assert self.schedule.blocks.pulled(key(pull))

    def waits(self, *works: Work) -> None:
        self.schedule.offer(works, is_batch=False)

    def iterate(self, now: float = 0.0) -> DecodePlan:
        plan = self.schedule.plan(now)
        for chunk, count in plan.chunks:
            self.schedule.computed(chunk, count)
        self.schedule.sampled(plan.run)
        return plan


def key(work: Work) -> RequestKey:
    return work.request.key


def keys(*works: Work) -> list[RequestKey]:
    return [key(work) for work in works]


def decoding(tbt_s: float, num_tokens: int = 20) -> Work:
    return make_work(num_tokens, deadlines=Deadlines(is_rt=True, first_due_s=0.0, tbt_s=tbt_s))


def prompt(num_tokens: int, first_due_s: float = 100.0) -> Work:
    deadlines = Deadlines(is_rt=True, first_due_s=first_due_s, tbt_s=100.0)
    return make_work(num_tokens, output_len=0, num_cached=0, deadlines=deadlines)


def document(num_tokens: int) -> Work:
    """A best-effort prompt."""
    return make_work(num_tokens, output_len=0, num_cached=0)


def job(due_s: float = math.inf, max_tokens: int | None = None, num_tokens: int = 20) -> Work:
    return make_work(num_tokens, max_tokens=max_tokens, deadlines=Deadlines(job_due_s=due_s))
