"""A prefill instance without a router: what it is ordered, what it says, and what is in the pool then."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from alignedserve.instance.config import TransferConfig
from alignedserve.instance.live_transfers import LiveTransfers
from alignedserve.prefill_worker.worker import PrefillWorker
from alignedserve.protocol.messages import (
    AnyMessage,
    Gone,
    InstanceLimits,
    NewTokens,
    PrefillReport,
    Request,
    Work,
)
from alignedserve.sampling_params import SamplingParams
from alignedserve.scheduling.boundary import PrefillBoundary
from alignedserve.scheduling.policies import Policy
from alignedserve.scheduling.policies.fcfs import Fcfs
from alignedserve.scheduling.policy import PrefillPart
from alignedserve.timing.estimate import Estimate
from alignedserve.types import Epoch, PoolBlockId, RequestKey
from tests.engine.helpers import greedy_params, make_engine
from tests.worker_parts import engine_of

KEY = RequestKey(7)
BLOCK = 16


class InterruptingPart(PrefillPart):
    """Preempts the first prompt that has so many tokens."""

    is_done = False

    def plan(self, at: PrefillBoundary) -> None:
        for request in at.computing:
            if request.num_computed >= 80 and not self.is_done:
                self.is_done = True
                at.preempt(request)
        super().plan(at)


class Interrupting(Fcfs):
    def prefill(self, limits: InstanceLimits, estimate: Estimate | None) -> PrefillPart:
        return InterruptingPart(limits, self.config)


class Rig:
    """A prefill instance, forty tokens at a time, and memory for its KV."""

    def __init__(
        self,
        directory: Path,
        kv_bytes: int = 4 << 20,
        enable_prefix_caching: bool = False,
        policy: Policy | None = None,
        verify_blocks: float = 0.0,
    ) -> None:
        engine = make_engine(directory, kv_cache_memory_bytes=kv_bytes, max_num_batched_tokens=40)
        self.worker = PrefillWorker(
            engine,
            LiveTransfers(engine.cache.parts, Epoch(1), config=TransferConfig(verify_blocks=verify_blocks)),
            policy,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.pool = np.zeros((64 * engine.span.num_groups, engine.cache.format.block_bytes), dtype=np.uint8)
        self.worker.use_pool(self.pool)
        self.said: list[AnyMessage] = []

    def step(self) -> bool:
        messages, goes_on = self.worker.step()
        self.said += messages
        return goes_on

    def step_until(self, is_done: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + 60
        while not is_done():
            self.step()
            assert time.monotonic() < deadline_s, self.said

    @property
    def reports(self) -> list[PrefillReport]:
        return [message for message in self.said if isinstance(message, PrefillReport)]

    @property
    def news(self) -> list[NewTokens]:
        return [each for report in self.reports for each in report.news]

    @property
    def is_gone(self) -> bool:
        return Gone([KEY]) in self.said

    def close(self) -> None:
        self.worker.close()

    def check_idle(self) -> None:
        self.worker.leave_pool()
        self.worker.schedule.check_idle()
        engine_of(self.worker).check_idle()


def work(
    prompt: list[int], params: SamplingParams | None = None, num_cached: int = 0, key: RequestKey = KEY
) -> Work:
    request = Request(key, prompt, params or greedy_params(), seed=0, arrival_s=0.0)
    blocks = [PoolBlockId(block) for block in range(-(-len(prompt) // BLOCK))]
    return Work(request, [], num_cached, blocks)
