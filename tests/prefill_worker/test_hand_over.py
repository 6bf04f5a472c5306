"""Prompts that were just computed: a decode instance pulls their KV over a real connection from where it is, beside the
copy to the pool, and nothing is left of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from alignedserve.instance.config import TransferConfig
from alignedserve.instance.live_transfers import LiveTransfers
from alignedserve.prefill_worker.worker import PrefillWorker
from alignedserve.protocol.messages import Abort, Failed, Gone, Prefill, Stage, Unstage, Work
from alignedserve.sampling_params import SamplingParams
from alignedserve.timing.deadlines import Deadlines
from alignedserve.transport.completions import Completions
from alignedserve.transport.kv_receiver import KVReceiver
from alignedserve.types import BlockId, Epoch, InstanceId, RequestKey
from tests.engine.helpers import greedy_params, make_engine
from tests.prefill_worker import rig as plain
from tests.prefill_worker.rig import KEY
from tests.tiny_models import prompts
from tests.transport.helpers import Outcomes, identity
from tests.worker_parts import engine_of, pool_mover_of, transfers_of

Directory = Callable[[str], Path]
PREFILL, DECODE = InstanceId("prefill-0"), InstanceId("decode-0")
OTHER = RequestKey(8)
PROMPT = prompts()[8]
NUM_BLOCKS = 19


class Rig(plain.Rig):
    """With a link, and a decode instance's end of it."""

    def __init__(self, directory: Path, staging_share: float = 0.5) -> None:
        engine = make_engine(directory, kv_cache_memory_bytes=4 << 20, max_num_batched_tokens=40)
        config = TransferConfig("gloo", staging_share=staging_share)
        self.worker = PrefillWorker(engine, LiveTransfers(engine.cache.parts, Epoch(1), config=config))
        address = transfers_of(self.worker).listen(identity(PREFILL))
        self.pool = np.zeros((64, engine.cache.format.block_bytes), dtype=np.uint8)
        self.worker.use_pool(self.pool)
        self.said = []
        self.pulled = torch.zeros((NUM_BLOCKS, *engine.cache.format.shape), dtype=torch.float32)
        self.completions, self.outcomes = Completions(), Outcomes()
        self.receiver = KVReceiver("gloo", [self.pulled], identity(DECODE), self.completions)
        self._address = address

    def compute(self, *works: Work) -> None:
        """Until their KV is in the pool."""
        self.worker.on(Prefill([*works]))
        keys = {each.request.key for each in works}
        self.step_until(lambda: keys <= {key for report in self.reports for key, _ in report.saved})

    def pull(self, key: RequestKey = KEY) -> str | None:
        specs = [(key, [BlockId(block) for block in range(NUM_BLOCKS)])]
        self.receiver.pull(PREFILL, self._address, specs, self.outcomes.append)
        assert self.completions.run(timeout_s=60) == 1
        return self.outcomes[-1].error

    @property
    def held(self) -> list[RequestKey]:
        return [key for report in self.reports for key in report.held]

    @property
    def is_empty(self) -> bool:
        return self.worker.memory.num_free == self.worker.memory.num_blocks

    def close(self) -> None:
        self.worker.drop_all()
        self.worker.close()
        self.worker.check_idle()
        engine_of(self.worker).check_idle()
        self.receiver.close()


def work(
    prompt: list[int], params: SamplingParams | None = None, key: RequestKey = KEY, is_rt: bool = True
) -> Work:
    return replace(plain.work(prompt, params, key=key), deadlines=Deadlines(is_rt))


@pytest.fixture
def rig(tiny_model: Directory) -> Iterator[Rig]:
    with closing(Rig(tiny_model("llama-gqa-tied"))) as rig:
        yield rig


def test_what_was_computed_is_pulled_and_saved(rig: Rig) -> None:
    rig.compute(work(PROMPT))
    assert rig.held == [KEY] and not rig.is_empty
    assert rig.pull() is None
    assert rig.pulled.any()
    pulled = rig.pulled.view(NUM_BLOCKS, -1).view(torch.uint8).numpy()
    full = len(PROMPT) // 16
    assert np.array_equal(pulled[:full], rig.pool[:full])
    rig.step_until(lambda: rig.is_empty)
    rig.worker.on(Unstage([KEY]))
    rig.step()
    assert not rig.is_gone and rig.held == [KEY]


def test_it_is_reported_with_its_first_token(rig: Rig) -> None:
    rig.compute(work(PROMPT))
    (with_token,) = (report for report in rig.reports if report.news)
    assert with_token.held == [KEY]


def test_what_need_not_be_held_is_free_when_it_is_saved(rig: Rig) -> None:
    rig.worker.on(Prefill([work(PROMPT)]))
    rig.step_until(lambda: rig.held)
    rig.worker.on(Unstage([KEY]))
    rig.step_until(lambda: rig.is_empty)
    assert any(report.saved for report in rig.reports)
    assert rig.pull() == "request 7 is not staged"


def test_best_effort_is_not_held(rig: Rig) -> None:
    rig.compute(work(PROMPT, is_rt=False))
    assert not rig.held and rig.is_empty


def test_what_ends_with_its_first_token_is_not_held(rig: Rig) -> None:
    rig.worker.on(Prefill([work(PROMPT, greedy_params(1))]))
    rig.step_until(lambda: rig.news)
    assert rig.news[0].finish_reason and not rig.held
    rig.step_until(lambda: rig.is_empty)


@pytest.mark.parametrize("num_steps", [1, 7, 8, 9, 50])
def test_abort_at_any_time_is_answered_once_its_blocks_are_free(rig: Rig, num_steps: int) -> None:
    rig.worker.on(Prefill([work(PROMPT)]))
    for _ in range(num_steps):
        rig.step()
    assert (num_steps < 8) == (not rig.held)
    rig.worker.on(Abort([KEY]))
    rig.step_until(lambda: rig.is_gone)
    assert rig.is_empty
    rig.step()
    assert rig.said.count(Gone([KEY])) == 1
    assert rig.pull() == "request 7 is not staged"


def test_a_save_that_fails_lets_go(rig: Rig) -> None:
    pool_mover_of(rig.worker)._clock = lambda: math.inf  # Every deadline has passed.
    rig.worker.on(Prefill([work(PROMPT)]))
    rig.step_until(lambda: Failed(KEY, "save", "its deadline passed") in rig.said)
    assert rig.is_empty and rig.pull() == "request 7 is not staged"


def test_orders_for_a_request_that_is_held_wait_until_it_is_let_go(rig: Rig) -> None:
    rig.compute(work(PROMPT))
    staged = replace(work(PROMPT), num_cached=len(PROMPT), output=[5])
    rig.worker.on(Unstage([KEY]))
    rig.worker.on(Stage(DECODE, [staged]))
    rig.step_until(lambda: any(report.staged for report in rig.reports))
    rig.worker.on(Unstage([KEY]))
    rig.step_until(lambda: rig.is_empty)
    rig.said.clear()
    rig.compute(work(PROMPT))
    # It is pulled, of which the instance has not heard when the next order comes.
    assert rig.pull() is None
    rig.worker.on(Unstage([KEY]))
    rig.worker.on(Prefill([work(PROMPT)]))
    rig.step_until(lambda: len(rig.held) == 2)
    rig.worker.on(Unstage([KEY]))
    rig.worker.on(Stage(DECODE, [staged]))
    rig.worker.on(Abort([KEY]))
    rig.step_until(lambda: rig.is_gone)
    assert rig.is_empty


def test_a_new_pool_voids_what_is_held(rig: Rig) -> None:
    rig.compute(work(PROMPT))
    rig.worker.use_pool(np.zeros_like(rig.pool))
    assert rig.is_empty and rig.pull() == "request 7 is not staged"


def test_an_instance_that_starts_again_holds_nothing_of_its_former_life(
    rig: Rig, tiny_model: Directory
) -> None:
    """A decode instance may pull what an earlier epoch of the instance has offered: it is denied."""
    rig.compute(work(PROMPT))
    with closing(Rig(tiny_model("llama-gqa-tied"))) as later:
        rig._address = later._address
        assert rig.pull() == "request 7 is not staged"
        assert rig.outcomes[-1].is_denied


def test_prompts_find_room_beside_what_is_held(tiny_model: Directory) -> None:
    """So much is held as may be staged, and no more: the longest prompt fits beside it."""
    with closing(Rig(tiny_model("llama-gqa-tied"), staging_share=0.1)) as rig:
        most = rig.worker.limits.num_staging_blocks
        keys = [RequestKey(number) for number in range(1, 2 + most // NUM_BLOCKS + 1)]
        for key in keys:
            rig.compute(work(PROMPT, key=key))
        assert rig.held == keys[: most // NUM_BLOCKS], "the others were free when they were saved"
        assert rig.worker.memory.num_free == rig.worker.memory.num_blocks - NUM_BLOCKS * len(rig.held)
        rig.worker.on(Unstage([keys[0]]))
        rig.compute(work(PROMPT, key=OTHER))
        assert rig.held[-1] == OTHER
