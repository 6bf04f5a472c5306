"""A prefill and a decode instance on real engines and a pool, in one process, with a few rules in place of the router.

Every request is prefilled, saved, offered, admitted. Between reports the script may interfere: `meddle` sees the island
after every turn. What a request got so far is checked on the way: no token is missing or comes twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from alignedserve.engine.engine import Engine
from alignedserve.instance.worker import Worker
from alignedserve.messages import (
    Abort,
    AnyMessage,
    DecodeReport,
    Evict,
    Failed,
    Gone,
    NewTokens,
    Offer,
    Prefill,
    PrefillReport,
    Request,
    Work,
)
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import Epoch, PoolBlockId, RequestKey
from decode_worker.schedule import DecodeOptions
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tests.engine.helpers import make_engine

STALL_S = 60.0


class Blocks:
    """Who has which block of the pool."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self._block_size = num_blocks, block_size
        self._free = [PoolBlockId(block) for block in range(num_blocks)]
        self._held: dict[RequestKey, list[PoolBlockId]] = {}

    def reserve(self, key: RequestKey, num_tokens: int) -> list[PoolBlockId]:
        held = self._held.setdefault(key, [])
        while len(held) * self._block_size < num_tokens:
            held.append(self._free.pop())
        return list(held)

    def release(self, key: RequestKey) -> None:
        self._free += self._held.pop(key, [])

    def check_idle(self) -> None:
        assert not self._held and len(set(self._free)) == self.num_blocks


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


class Island:
    def __init__(
        self,
        directory: Path,
        *,
        num_pool_blocks: int = 512,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        options: DecodeOptions | None = None,
        meddle: Callable[[Island], None] = lambda island: None,
        **both: Any,
    ) -> None:
        self._wake = threading.Event()
        self.prefill = PrefillWorker(_engine(directory, both, prefill), Epoch(1), self._wake.set)
        self.decode = DecodeWorker(_engine(directory, both, decode), Epoch(1), self._wake.set, options)
        form = self.prefill.engine.cache.format
        self.blocks = Blocks(num_pool_blocks, form.block_size)
        self.pool = np.zeros((num_pool_blocks, form.block_bytes), dtype=np.uint8)
        self.workers: tuple[Worker, Worker] = (self.prefill, self.decode)
        for worker in self.workers:
            worker.use_pool(self.pool)
        self.entries: dict[RequestKey, Entry] = {}
        self.meddle = meddle
        self.failures: list[Failed] = []
        self.reports: list[DecodeReport] = []
        self.num_turns = self.num_evicted = self.num_recomputed = 0

    # ---- what tests do ----------------------------------------------------------------------------------------------

    def run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
        """The tokens of each; everything is empty afterwards."""
        entries = [self.submit(prompt, wanted) for prompt, wanted in zip(prompts, params, strict=True)]
        self.finish()
        return [entry.output for entry in entries]

    def submit(self, prompt: list[int], params: SamplingParams) -> Entry:
        key = RequestKey(len(self.entries) + 1)
        entry = self.entries[key] = Entry(Request(key, prompt, params, params.seed or 0, arrival_s=0.0))
        return entry

    def finish(self) -> None:
        while not self._is_over:
            self.turn()
        self.close()
        self.check_idle()

    def close(self) -> None:
        for worker in self.workers:
            worker.leave_pool()

    def check_idle(self) -> None:
        self.prefill.schedule.check_idle()
        self.decode.schedule.check_idle()
        self.blocks.check_idle()
        for worker in self.workers:
            worker.engine.check_idle()

    def in_place(self, place: str) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.place == place]

    def evict(self, entry: Entry) -> None:
        entry.place = "evicting"
        blocks = self.blocks.reserve(entry.key, entry.num_tokens)
        self.decode.on(Evict(entry.key, blocks, entry.num_cached))

    def abort(self, entry: Entry) -> None:
        entry.is_aborted = True
        self._recall(entry)

    # ---- in place of the router -------------------------------------------------------------------------------------

    def turn(self) -> None:
        self.num_turns += 1
        self._wake.clear()
        self._order()
        goes_on = [self._step(worker) for worker in self.workers]
        self.meddle(self)
        if not (any(goes_on) or self._has_orders() or self._is_over) and not self._wake.wait(STALL_S):
            places = {entry.key: entry.place for entry in self.entries.values()}
            raise RuntimeError(f"nothing moved for {STALL_S:.0f} s: {places}")

    @property
    def _is_over(self) -> bool:
        return all(entry.place == "over" for entry in self.entries.values())

    def _has_orders(self) -> bool:
        return bool(self.in_place("queued") or self.in_place("pooled"))

    def _order(self) -> None:
        for entry in self.in_place("queued"):
            entry.place = "prefill"
            self.prefill.on(Prefill([self._work(entry)]))
        pooled = self.in_place("pooled")
        if pooled:
            self.decode.on(Offer([self._work(entry) for entry in pooled], is_batch=self.num_turns % 2 == 0))
        for entry in pooled:
            entry.place = "decode"

    def _work(self, entry: Entry) -> Work:
        blocks = self.blocks.reserve(entry.key, entry.num_tokens)
        return Work(entry.request, list(entry.output), entry.num_cached, blocks)

    def _step(self, worker: Worker) -> bool:
        messages, goes_on = worker.step()
        for message in messages:
            self._received(message)
        return goes_on

    def _received(self, message: AnyMessage) -> None:
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
                self.failures.append(message)
                entry = self.entries[message.key]
                if not entry.is_aborted:
                    entry.place = "running" if message.what == "evict" else "queued"

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
        for key, num_tokens in report.evicted:
            self.num_evicted += 1
            self._saved(self.entries[key], num_tokens)

    def _saved(self, entry: Entry, num_tokens: int) -> None:
        assert entry.num_cached <= num_tokens < entry.num_tokens
        entry.num_cached = num_tokens
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

    def _recall(self, entry: Entry) -> None:
        worker = self.prefill if entry.place == "prefill" else self.decode
        entry.place = "leaving"
        worker.on(Abort(entry.key))

    def _left(self, entry: Entry) -> None:
        """No instance has it; nobody touches its blocks."""
        assert entry.place == "leaving"
        entry.place = "over" if entry.is_finished or entry.is_aborted else "queued"
        if entry.place == "over":
            self.blocks.release(entry.key)


def _engine(directory: Path, both: dict[str, Any], own: dict[str, Any] | None) -> Engine:
    return make_engine(directory, **{"kv_cache_memory_bytes": 4 << 20, **both, **(own or {})})
