"""What an island did, from its router's event log: counts by instance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from alignedserve.protocol.messages import (
    DecodeReport,
    Failed,
    Hello,
    NewTokens,
    Offer,
    Prefill,
    PrefillReport,
    Reserved,
    Tokens,
)
from alignedserve.router.eventlog import replay
from alignedserve.router.events import Connected, Event, Received, Send
from alignedserve.types import InstanceId, RequestKey


class History:
    def __init__(self, logs: Path, since_s: float = 0.0) -> None:
        """Counts by instance. `since_s`: a time on the monotonic clock at which nothing was in progress. Earlier events
        are not counted."""
        self.prefills: Counter[InstanceId] = Counter()
        self.staged: Counter[InstanceId] = Counter()
        self.batches: Counter[InstanceId] = Counter()
        self.near: Counter[InstanceId] = Counter()
        # By target, and the instance that had staged it.
        self.admitted: Counter[tuple[InstanceId, InstanceId | None]] = Counter()
        self.evicted: Counter[InstanceId] = Counter()
        # Requests that left without their KV.
        self.dropped: Counter[InstanceId] = Counter()
        self.most_running: Counter[InstanceId] = Counter()
        # Spare copies that had to be dropped.
        self.num_dropped = 0
        # Prompt tokens with KV that an instance already had.
        self.found: Counter[InstanceId] = Counter()
        self.failures: list[Failed] = []
        self.hellos: list[Hello] = []
        # Messages sent to gateways.
        self.news: list[NewTokens] = []
        self._sources: dict[RequestKey, InstanceId | None] = {}
        for now, event, orders in _replay_all(logs):
            if now < since_s:
                continue
            self._take_event(event)
            for order in orders:
                self._take_order(order)

    def _take_event(self, event: Event) -> None:
        match event:
            case Received(sender=sender, message=PrefillReport(staged=staged, num_found=num_found)):
                self.staged[sender] += len(staged)
                self.found[sender] += num_found
            case Received(sender=sender, message=DecodeReport() as report):
                self.evicted[sender] += len(report.evicted)
                self.dropped[sender] += len(report.dropped)
                self.found[sender] += report.num_found
                self.most_running[sender] = max(self.most_running[sender], report.num_running)
                for key in report.admitted:
                    self.admitted[sender, self._sources[key]] += 1
            case Received(message=Reserved(dropped=dropped)):
                self.num_dropped += len(dropped)
            case Received(message=Failed() as failed):
                self.failures.append(failed)
            case Connected(hello=hello):
                self.hellos.append(hello)

    def _take_order(self, order: Send) -> None:
        match order.message:
            case Prefill(works=works):
                self.prefills[order.to] += len(works)
            case Offer() as offer:
                (self.batches if offer.is_batch else self.near)[order.to] += 1
                for work in offer.works:
                    self._sources[work.request.key] = offer.source
            case Tokens(news=news):
                self.news += news


def _replay_all(logs: Path) -> Iterator[tuple[float, Event, list[Send]]]:
    """Replays the log of every router in the run."""
    for path in sorted(logs.glob("router-*.events")):
        yield from replay(path)
