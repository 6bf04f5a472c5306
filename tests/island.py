"""A prefill and a decode instance with real engines and a pool in one process, and a few rules in place of the router.

Every request is prefilled, saved, offered and admitted. A test may interfere between reports: `meddle` sees the island
after every turn. The tokens that a request has received are checked on the way: none may be missing or come twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from alignedserve.decode_worker.worker import DecodeWorker
from alignedserve.engine.engine import Engine
from alignedserve.instance.config import TransferConfig
from alignedserve.instance.live_transfers import LiveTransfers
from alignedserve.instance.worker import Worker
from alignedserve.kvpool.owners import OwnerTable
from alignedserve.kvpool.pool import Pool
from alignedserve.prefill_worker.worker import PrefillWorker
from alignedserve.protocol.messages import (
    Abort,
    AnyMessage,
    Commit,
    DecodeReport,
    Evict,
    Failed,
    Gone,
    NewTokens,
    Offer,
    Prefill,
    PrefillReport,
    Release,
    Request,
    Reserve,
    Reserved,
    Work,
)
from alignedserve.sampling_params import SamplingParams
from alignedserve.scheduling.policies import Policy
from alignedserve.types import Epoch, PoolBlockId, RequestKey
from tests.engine.helpers import make_engine

STALL_S = 60.0


@dataclass
class Entry:
    request: Request
    output: list[int] = field(default_factory=list)
    num_cached: int = 0
    news: list[NewTokens] = field(default_factory=list)
    # "queued", "prefill", "pooled", "decode", "running", "evicting", "leaving", "over"
    place: str = "queued"
    is_aborted: bool = False

    @property
    def key(self) -> RequestKey:
        return self.request.key

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.output)

    @property
    def is_finished(self) -> bool:
        return bool(self.news) and self.news[-1].finish_reason is not None


class Rules:
    """Replaces the router: every request continues at once, and an evicted one is gone when the instance reports it."""

    def __init__(
        self,
        table: OwnerTable,
        block_size: int,
        to_prefill: Callable[[AnyMessage], None],
        to_decode: Callable[[AnyMessage], None],
    ) -> None:
        self.pool = Pool(table, block_size, now=0.0)
        self.to_prefill, self.to_decode = to_prefill, to_decode
        self.entries: dict[RequestKey, Entry] = {}
        self.failures: list[Failed] = []
        self.reports: list[DecodeReport] = []
        # Tokens that a request may compute while the order to evict it is on its way.
        self.evict_slack = 0
        self.num_turns = self.num_evicted = self.num_dropped = self.num_recomputed = 0

    # ---- for tests --------------------------------------------------------------------------------------------------

    def submit(self, prompt: list[int], params: SamplingParams, owner: str = "") -> Entry:
        key = RequestKey(len(self.entries) + 1)
        request = Request(key, prompt, params, params.seed or 0, arrival_s=0.0, owner=owner)
        entry = self.entries[key] = Entry(request)
        return entry

    def in_place(self, place: str) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.place == place]

    @property
    def is_over(self) -> bool:
        return all(entry.place == "over" for entry in self.entries.values())

    @property
    def has_orders(self) -> bool:
        return bool(self.in_place("queued") or self.in_place("pooled"))

    def evict(self, entry: Entry) -> None:
        entry.place = "evicting"
        self.to_decode(Evict(entry.key, self._reserve(entry, self.evict_slack), entry.num_cached))

    def abort(self, entry: Entry) -> None:
        entry.is_aborted = True
        self._recall(entry)

    # ---- orders -----------------------------------------------------------------------------------------------------

    def order(self) -> None:
        self.num_turns += 1
        for entry in self.in_place("queued"):
            entry.place = "prefill"
            self.to_prefill(Prefill([self._work(entry)]))
        pooled = self.in_place("pooled")
        for entry in pooled:
            entry.place = "decode"
        if pooled:
            self.to_decode(Offer([self._work(entry) for entry in pooled], is_batch=self.num_turns % 2 == 0))

    def _work(self, entry: Entry) -> Work:
        return Work(entry.request, list(entry.output), entry.num_cached, self._reserve(entry))

    def _reserve(self, entry: Entry, num_more: int = 0) -> list[PoolBlockId]:
        (reserved,) = self.pool.on(Reserve(entry.key, entry.num_tokens + num_more), now=0.0)
        assert isinstance(reserved, Reserved) and reserved.blocks is not None
        return reserved.blocks

    def _recall(self, entry: Entry) -> None:
        to = self.to_prefill if entry.place == "prefill" else self.to_decode
        entry.place = "leaving"
        to(Abort([entry.key]))

    # ---- reports ----------------------------------------------------------------------------------------------------

    def received(self, message: AnyMessage) -> None:
        match message:
            case PrefillReport():
                self._news(message.news)
                for key, num_tokens in message.saved:
                    self._saved(self.entries[key], num_tokens)
            case DecodeReport():
                self._decode_report(message)
            case Gone():
                for key in message.keys:
                    self._left(self.entries[key])
            case Failed():
                self._failed(message)

    def _decode_report(self, report: DecodeReport) -> None:
        self.reports.append(report)
        for key in report.admitted:
            assert self.entries[key].place in ("decode", "leaving")
            if self.entries[key].place == "decode":
                self.entries[key].place = "running"
        self._news(report.news)
        for key in report.wants_evicted:
            if self.entries[key].place == "running":
                self.evict(self.entries[key])
        for key in report.dropped:
            self.num_dropped += 1
            self.entries[key].place = "queued"
        for key, num_tokens in report.evicted:
            self.num_evicted += 1
            self._saved(self.entries[key], num_tokens)

    def _saved(self, entry: Entry, num_tokens: int) -> None:
        assert entry.num_cached <= num_tokens < entry.num_tokens
        entry.num_cached = num_tokens
        self.pool.on(Commit(entry.key, num_tokens, due_s=0.0), now=0.0)
        if not entry.is_aborted:
            entry.place = "pooled"

    def _news(self, all_news: Sequence[NewTokens]) -> None:
        for news in all_news:
            entry = self.entries[news.key]
            assert news.first == len(entry.output)
            entry.output += news.tokens
            entry.news.append(news)
            if news.finish_reason and not entry.is_aborted:
                self._recall(entry)

    def _failed(self, failed: Failed) -> None:
        self.failures.append(failed)
        entry = self.entries[failed.key]
        if not entry.is_aborted:
            entry.place = "running" if failed.what == "evict" else "queued"

    def _left(self, entry: Entry) -> None:
        """No instance has it any more, and none touches its blocks."""
        assert entry.place == "leaving"
        entry.place = "over" if entry.is_finished or entry.is_aborted else "queued"
        if entry.place == "over":
            self.pool.on(Release([entry.key]), now=0.0)


class Island(Rules):
    def __init__(
        self,
        directory: Path,
        *,
        num_pool_blocks: int = 512,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        policy: Policy | None = None,
        meddle: Callable[[Island], None] = lambda island: None,
        enable_prefix_caching: bool = False,
        transfers: TransferConfig | None = None,
        **both: Any,
    ) -> None:
        """`enable_prefix_caching`: at the decode instance."""
        self._transfers = transfers
        self._wake = threading.Event()
        self.prefill = PrefillWorker(*self._parts(directory, both, prefill))
        self.decode = DecodeWorker(
            *self._parts(directory, both, decode), policy, enable_prefix_caching=enable_prefix_caching
        )
        self.workers: tuple[Worker, Worker] = (self.prefill, self.decode)
        form = cast(Engine, self.prefill.engine).cache.format
        super().__init__(OwnerTable.plain(num_pool_blocks), form.block_size, self.prefill.on, self.decode.on)
        self.memory = np.zeros((num_pool_blocks, form.column_bytes), dtype=np.uint8)
        for worker in self.workers:
            worker.use_pool(self.memory)
        self.meddle = meddle

    def _parts(
        self, directory: Path, both: dict[str, Any], own: dict[str, Any] | None
    ) -> tuple[Engine, LiveTransfers]:
        engine = _engine(directory, both, own)
        num_groups = engine.cache.format.num_groups
        return engine, LiveTransfers(
            engine.cache.parts, Epoch(1), self._wake.set, self._transfers, num_groups=num_groups
        )

    def run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
        """Returns the tokens of each request. Everything has to be empty afterwards."""
        entries = [self.submit(prompt, wanted) for prompt, wanted in zip(prompts, params, strict=True)]
        self.finish()
        return [entry.output for entry in entries]

    def finish(self) -> None:
        while not self.is_over:
            self.turn()
        self.close()
        self.check_idle()

    def turn(self) -> None:
        self._wake.clear()
        self.order()
        goes_on = [self._step(worker) for worker in self.workers]
        self.meddle(self)
        if not (any(goes_on) or self.has_orders or self.is_over) and not self._wake.wait(STALL_S):
            places = {entry.key: entry.place for entry in self.entries.values()}
            raise RuntimeError(f"nothing moved for {STALL_S:.0f} s: {places}")

    def close(self) -> None:
        for worker in self.workers:
            worker.leave_pool()

    def check_idle(self) -> None:
        self.prefill.schedule.check_idle()
        self.decode.schedule.check_idle()
        self.pool.check_idle()
        for worker in self.workers:
            cast(Engine, worker.engine).check_idle()

    def _step(self, worker: Worker) -> bool:
        messages, goes_on = worker.step()
        for message in messages:
            self.received(message)
        return goes_on


def _engine(directory: Path, both: dict[str, Any], own: dict[str, Any] | None) -> Engine:
    return make_engine(directory, **{"kv_cache_memory_bytes": 4 << 20, **both, **(own or {})})
