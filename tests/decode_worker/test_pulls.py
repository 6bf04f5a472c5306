"""Requests that a prefill instance has staged, pulled over a real connection."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from alignedserve.decode_worker.worker import DecodeWorker
from alignedserve.instance.config import TransferConfig
from alignedserve.instance.live_transfers import LiveTransfers
from alignedserve.prefill_worker.worker import PrefillWorker
from alignedserve.protocol.messages import (
    Abort,
    AnyMessage,
    DecodeReport,
    Failed,
    FailedPull,
    Gone,
    Offer,
    Prefill,
    PrefillReport,
    Request,
    Stage,
    Unstage,
    Work,
)
from alignedserve.timing.deadlines import Deadlines
from alignedserve.transport.data_path import allocator
from alignedserve.types import Epoch, InstanceId, PoolBlockId, RequestKey
from tests.engine.helpers import greedy_params, make_engine
from tests.tiny_models import greedy, prompts
from tests.transport.helpers import identity
from tests.worker_parts import engine_of

PREFILL, DECODE = InstanceId("prefill-0"), InstanceId("decode-0")
KEYS = [RequestKey(key) for key in (1, 2, 3)]
PROMPT = list(range(1, 41))
# of a prompt
NUM_BLOCKS = 3


class Pair:
    """Both kinds of instances over one pool, of zeros: what is computed from it doesn't matter here."""

    def __init__(self, directory: Path, transport: str = "gloo", enable_prefix_caching: bool = False) -> None:
        """`enable_prefix_caching`: at the decode instance."""
        config = TransferConfig(transport)
        engines = [
            make_engine(directory, kv_cache_memory_bytes=4 << 20, allocate=allocate)
            for allocate in (allocator(transport), torch.empty)
        ]
        form = engines[0].cache.format
        transfers = [
            LiveTransfers(engine.cache.parts, Epoch(1), config=config, num_groups=form.num_groups)
            for engine in engines
        ]
        self.prefill = PrefillWorker(engines[0], transfers[0])
        self.decode = DecodeWorker(engines[1], transfers[1], enable_prefix_caching=enable_prefix_caching)
        self.address = transfers[0].listen(identity(PREFILL))
        transfers[1].be_known_as(identity(DECODE))
        self.pool = np.zeros((20, form.column_bytes), dtype=np.uint8)
        for worker in (self.prefill, self.decode):
            worker.use_pool(self.pool)
        self.said: list[AnyMessage] = []

    def step_until(self, is_done: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + 60
        while not is_done():
            for worker in (self.prefill, self.decode):
                self.said += worker.step()[0]
            assert time.monotonic() < deadline_s, self.said

    def stage(self) -> None:
        self.prefill.on(Stage(DECODE, [work(key) for key in KEYS]))
        self.step_until(lambda: set(KEYS) <= set(self.staged))

    def offer(self, address: str | None = None) -> None:
        works = [work(key) for key in KEYS]
        self.decode.on(Offer(works, is_batch=True, source=PREFILL, address=address or self.address))

    @property
    def saved(self) -> list[RequestKey]:
        return [key for each in self.said if isinstance(each, PrefillReport) for key, _ in each.saved]

    @property
    def tokens(self) -> list[int]:
        reports = [each for each in self.said if isinstance(each, PrefillReport | DecodeReport)]
        return [token for each in reports for news in each.news for token in news.tokens]

    @property
    def moved(self) -> dict[str, int]:
        """Bytes by kind of copy."""
        found = Counter[str]()
        for each in self.said:
            for moved in each.moved if isinstance(each, PrefillReport | DecodeReport) else ():
                found[moved.what] += moved.num_bytes
        return dict(found)

    @property
    def staged(self) -> list[RequestKey]:
        return [key for each in self.said if isinstance(each, PrefillReport) for key in each.staged]

    @property
    def admitted(self) -> list[list[RequestKey]]:
        """Report by report."""
        return [each.admitted for each in self.said if isinstance(each, DecodeReport) and each.admitted]

    @property
    def failed(self) -> list[Failed]:
        return [each for each in self.said if isinstance(each, Failed)]

    @property
    def failed_pulls(self) -> list[FailedPull]:
        return [pull for each in self.said if isinstance(each, DecodeReport) for pull in each.failed_pulls]

    def close(self) -> None:
        for worker in (self.decode, self.prefill):
            worker.drop_all()
            worker.close()
            engine_of(worker).check_idle()


@pytest.fixture
def pair(tiny_model: Callable[[str], Path]) -> Iterator[Pair]:
    with closing(Pair(tiny_model("llama-gqa-tied"))) as pair:
        yield pair


def work(key: RequestKey) -> Work:
    request = Request(key, PROMPT, greedy_params(), seed=0, arrival_s=0.0)
    blocks = [PoolBlockId(NUM_BLOCKS * (key - 1) + index) for index in range(NUM_BLOCKS)]
    return Work(request, [5], len(PROMPT), blocks)


def test_several_requests_come_in_one_transfer(pair: Pair) -> None:
    pair.stage()
    pair.offer()
    pair.step_until(lambda: pair.admitted)
    assert pair.admitted == [KEYS]


def test_one_that_is_gone_from_there_takes_no_other_along(pair: Pair) -> None:
    pair.stage()
    pair.prefill.on(Unstage([KEYS[1]]))
    pair.step_until(lambda: pair.prefill.schedule.stages.num_blocks == 2 * NUM_BLOCKS)
    pair.offer()
    pair.step_until(lambda: pair.failed)
    pair.step_until(lambda: [key for keys in pair.admitted for key in keys] == KEYS[::2])
    assert pair.failed == [Failed(KEYS[1], "pull", "request 2 is not staged")]
    assert pair.failed_pulls == [], "the link works"


def test_a_link_that_fails_is_reported_once_before_its_requests(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = f"127.0.0.1:{listener.getsockname()[1]}"
    pair.offer(nobody)
    pair.step_until(lambda: len(pair.failed) == len(KEYS))
    (report,) = [each for each in pair.said if isinstance(each, DecodeReport) and each.failed_pulls]
    (pull,) = report.failed_pulls
    assert (pull.source, pull.keys) == (PREFILL, KEYS) and "Connection refused" in pull.reason
    assert pair.failed == [Failed(key, "pull", pull.reason) for key in KEYS]
    assert pair.said.index(report) < pair.said.index(pair.failed[0])


def test_a_pull_that_nobody_waits_for_says_nothing_of_its_link(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        pair.offer(f"{host}:{port}")
        pair.said += pair.decode.step()[0]
        for key in KEYS:
            pair.decode.on(Abort([key]))
    pair.step_until(lambda: sum(isinstance(each, Gone) for each in pair.said) == len(KEYS))
    assert pair.failed_pulls == [] == pair.failed


@pytest.mark.parametrize("is_staged", [False, True], ids=["handed over", "staged"])
@pytest.mark.parametrize("family", ["mistral-window", "gemma3"])
def test_of_a_window_its_blocks_alone_are_pulled(
    tiny_model: Callable[[str], Path], family: str, is_staged: bool
) -> None:
    """Of 150 tokens in 10 columns, the 24 before the next one, and with these all of their tile of 64: 6 columns. Of
    Gemma's three layers two slide."""
    directory, prompt, key = tiny_model(family), prompts()[7], KEYS[0]
    asked = Request(key, prompt, greedy_params(16), seed=0, arrival_s=0.0)
    prompt_work = Work(asked, [], 0, [PoolBlockId(block) for block in range(10)], Deadlines(is_rt=True))
    with closing(Pair(directory)) as pair:
        span, block_bytes = pair.decode.engine.span, pair.decode.engine.format.block_bytes
        pair.prefill.on(Prefill([prompt_work]))
        pair.step_until(lambda: pair.saved)
        if is_staged:
            pair.prefill.on(Unstage([key]))
            # What is not loaded is NaN.
            in_pool = pair.pool.reshape(20, span.num_groups, -1)
            in_pool[:4, span.num_full_groups :] = 0xFF
            pair.prefill.on(Stage(DECODE, [replace(prompt_work, output=pair.tokens, num_cached=150)]))
            pair.step_until(lambda: pair.staged)
        work = replace(prompt_work, output=pair.tokens, num_cached=150)
        pair.decode.on(Offer([work], is_batch=True, source=PREFILL, address=pair.address))
        pair.step_until(lambda: len(pair.tokens) == 16)
        assert pair.tokens == greedy(directory)[7][:16]
        num_pulled = 6 if family == "mistral-window" else 10 + 2 * 6
        num_bytes = num_pulled * block_bytes
        assert pair.moved == {"save": 10 * span.num_groups * block_bytes, "pull": num_bytes} | (
            {"load": num_bytes} if is_staged else {}
        )
        assert not pair.failed and not pair.failed_pulls


@pytest.mark.parametrize("is_staged", [False, True], ids=["handed over", "staged"])
@pytest.mark.parametrize("transport", ["gloo", "ipc"])
@pytest.mark.parametrize("family", ["llama-gqa-tied", "gemma3"])
def test_what_is_here_is_not_pulled(
    tiny_model: Callable[[str], Path], family: str, transport: str, is_staged: bool
) -> None:
    """Two prompts of 150 tokens have 6 full columns of 16 in common. With Gemma's window, the 4 in front are passed."""
    directory, prompt = tiny_model(family), prompts()[7]
    asked = [prompt, prompt[:100] + prompts()[8][:50]]
    with closing(Pair(directory, transport, enable_prefix_caching=True)) as pair:
        span, block_bytes = pair.decode.engine.span, pair.decode.engine.format.block_bytes
        for key, tokens in zip(KEYS, asked, strict=False):
            request = Request(key, tokens, greedy_params(16), seed=0, arrival_s=0.0)
            blocks = [PoolBlockId(10 * (key == KEYS[1]) + block) for block in range(10)]
            work = Work(request, [], 0, blocks, Deadlines(is_rt=True))
            num_before, pulled_before = len(pair.tokens), pair.moved.get("pull", 0)
            pair.prefill.on(Prefill([work]))
            pair.step_until(lambda key=key: key in pair.saved)  # type: ignore[misc]
            work = replace(work, output=pair.tokens[num_before:], num_cached=150)
            if is_staged:
                pair.prefill.on(Unstage([key]))
                pair.prefill.on(Stage(DECODE, [work]))
                pair.step_until(lambda key=key: key in pair.staged)  # type: ignore[misc]
            pair.decode.on(Offer([work], is_batch=True, source=PREFILL, address=pair.address))
            pair.step_until(lambda num=num_before: len(pair.tokens) == num + 16)  # type: ignore[misc]
            num_pulled = (pair.moved["pull"] - pulled_before) // block_bytes
            first = 6 if key == KEYS[1] else 0
            assert num_pulled == sum(span.are_held(first, 10, span.num_passed(150)))
        assert pair.tokens[:16] == greedy(directory)[7][:16]
        assert not pair.failed and not pair.failed_pulls
        said = pair.tokens[16:]
    with closing(Pair(directory)) as plain:
        request = Request(KEYS[0], asked[1], greedy_params(16), seed=0, arrival_s=0.0)
        plain.prefill.on(Prefill([Work(request, [], 0, [PoolBlockId(block) for block in range(10)])]))
        plain.step_until(lambda: plain.saved)
        work = Work(request, plain.tokens, 150, [PoolBlockId(block) for block in range(10)])
        plain.decode.on(Offer([work], is_batch=True))
        plain.step_until(lambda: len(plain.tokens) == 16)
        assert plain.tokens == said
