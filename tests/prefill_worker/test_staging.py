"""Staged KV: loaded from the pool, pulled over a real connection or taken back, and nothing is left of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from alignedserve.instance.config import TransferConfig
from alignedserve.instance.live_transfers import LiveTransfers
from alignedserve.prefill_worker.worker import PrefillWorker
from alignedserve.protocol.messages import (
    Abort,
    AnyMessage,
    Failed,
    Gone,
    Prefill,
    PrefillReport,
    Request,
    Stage,
    Unstage,
    Work,
)
from alignedserve.transport.completions import Completions
from alignedserve.transport.kv_receiver import KVReceiver
from alignedserve.types import BlockId, Epoch, InstanceId, PoolBlockId, RequestKey
from tests.engine.helpers import greedy_params, make_engine
from tests.tiny_models import prompts
from tests.transport.helpers import Outcomes, identity
from tests.worker_parts import engine_of, pool_mover_of, transfers_of

Directory = Callable[[str], Path]
PREFILL, DECODE = InstanceId("prefill-0"), InstanceId("decode-0")
KEY, OTHER = RequestKey(7), RequestKey(8)
LONG = prompts()[8]
NUM_BLOCKS = 19


class Rig:
    """A prefill instance that sends, a pool of random bytes, and one that pulls."""

    def __init__(self, directory: Path) -> None:
        engine = make_engine(directory, kv_cache_memory_bytes=4 << 20, max_num_batched_tokens=40)
        self.worker = PrefillWorker(
            engine, LiveTransfers(engine.cache.parts, Epoch(1), config=TransferConfig("gloo"))
        )
        self.address = transfers_of(self.worker).listen(identity(PREFILL))
        shape = (64, engine.cache.format.block_bytes)
        self.pool = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        self.worker.use_pool(self.pool)
        self.said: list[AnyMessage] = []
        self.pulled = torch.zeros((NUM_BLOCKS, *engine.cache.format.shape), dtype=torch.float32)
        self.completions, self.outcomes = Completions(), Outcomes()
        self.receiver = KVReceiver("gloo", [self.pulled], identity(DECODE), self.completions)

    def on(self, *orders: AnyMessage) -> None:
        for order in orders:
            self.worker.on(order)

    def step(self) -> None:
        messages, _ = self.worker.step()
        self.said += messages

    def step_until(self, is_done: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + 60
        while not is_done():
            self.step()
            assert time.monotonic() < deadline_s, self.said

    def stage(self, *keys: RequestKey) -> None:
        self.on(Stage(DECODE, [work(key) for key in keys]))
        self.step_until(lambda: set(keys) <= set(self.staged))

    def pull(self, key: RequestKey) -> str | None:
        blocks = [BlockId(block) for block in range(NUM_BLOCKS)]
        self.receiver.pull(PREFILL, self.address, [(key, blocks)], self.outcomes.append)
        assert self.completions.run(timeout_s=60) == 1
        return self.outcomes[-1].error

    @property
    def staged(self) -> list[RequestKey]:
        return [key for each in self.said if isinstance(each, PrefillReport) for key in each.staged]

    @property
    def is_empty(self) -> bool:
        return self.worker.memory.num_free == self.worker.memory.num_blocks

    def close(self) -> None:
        self.worker.drop_all()
        self.worker.close()
        self.worker.schedule.check_idle()
        engine_of(self.worker).check_idle()
        self.receiver.close()


@pytest.fixture
def rig(tiny_model: Directory) -> Iterator[Rig]:
    with closing(Rig(tiny_model("llama-gqa-tied"))) as rig:
        yield rig


def work(key: RequestKey = KEY, num_cached: int = len(LONG)) -> Work:
    request = Request(key, LONG, greedy_params(), seed=0, arrival_s=0.0)
    blocks = [PoolBlockId(block) for block in range(20, 20 + NUM_BLOCKS + 1)]
    return Work(request, [5] if num_cached == len(LONG) else [], num_cached, blocks)


def test_what_is_staged_can_be_pulled_and_is_gone_then(rig: Rig) -> None:
    rig.stage(KEY)
    assert rig.worker.schedule.stages.num_blocks == NUM_BLOCKS
    assert rig.pull(KEY) is None
    assert np.array_equal(rig.pulled.view(NUM_BLOCKS, -1).view(torch.uint8).numpy(), rig.pool[20:39])
    rig.step_until(lambda: rig.is_empty)
    rig.on(Unstage([KEY]))
    rig.step()
    assert not any(isinstance(message, Gone) for message in rig.said)


def test_what_is_unstaged_can_not_be_pulled(rig: Rig) -> None:
    rig.stage(KEY, OTHER)
    rig.on(Unstage([KEY]))
    rig.step_until(lambda: rig.worker.schedule.stages.num_blocks == NUM_BLOCKS)
    assert rig.pull(KEY) == "request 7 is not staged"
    assert rig.pull(OTHER) is None


@pytest.mark.parametrize("num_steps", [0, 1, 2, 50])
def test_abort_at_any_time_is_answered_once_its_blocks_are_free(rig: Rig, num_steps: int) -> None:
    rig.on(Stage(DECODE, [work()]))
    for _ in range(num_steps):
        rig.step()
    rig.on(Abort([KEY]))
    rig.step_until(lambda: Gone([KEY]) in rig.said)
    assert rig.is_empty
    rig.step()
    assert rig.said.count(Gone([KEY])) == 1


def test_a_load_that_fails_is_reported(rig: Rig) -> None:
    pool_mover_of(rig.worker)._clock = lambda: math.inf  # every deadline has passed
    rig.on(Stage(DECODE, [work()]))
    rig.step_until(lambda: Failed(KEY, "load", "its deadline passed") in rig.said)
    assert rig.is_empty and not rig.staged


def test_orders_for_a_request_that_is_leaving_wait_until_it_has_left(rig: Rig) -> None:
    rig.stage(KEY)
    rig.on(Unstage([KEY]), Stage(DECODE, [work()]))
    rig.step_until(lambda: len(rig.staged) == 2)
    rig.on(Unstage([KEY]), Prefill([work(num_cached=0)]))
    rig.step_until(lambda: [each for each in rig.said if isinstance(each, PrefillReport) and each.saved])
    rig.stage(KEY)
    rig.on(Unstage([KEY]), Prefill([work(num_cached=0)]), Abort([KEY]))
    rig.step_until(lambda: Gone([KEY]) in rig.said)
    assert rig.is_empty


def test_a_new_pool_voids_what_is_staged(rig: Rig) -> None:
    rig.stage(KEY)
    rig.on(Stage(DECODE, [work(OTHER)]))
    rig.step()
    rig.worker.use_pool(np.zeros_like(rig.pool))
    assert rig.is_empty
    assert rig.pull(KEY) == "request 7 is not staged"
    rig.said.clear()
    rig.stage(KEY)
    assert rig.pull(KEY) is None
    assert not rig.pulled.any()
