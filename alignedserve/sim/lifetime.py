"""What happened to each request, and when: one list of events. Every metric is a difference of two of them.

The events are read from the router's messages, so they are the same for simulated and real instances.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from alignedserve.protocol.messages import (
    AnyMessage,
    DecodeReport,
    NewTokens,
    Offer,
    Prefill,
    PrefillReport,
    Stage,
    Submit,
)
from alignedserve.router.events import Event, Received, Send
from alignedserve.types import InstanceId, RequestKey


# There are many of these two. A struct is faster to create than a dataclass.
class LifeEvent(msgspec.Struct):
    time_s: float
    name: str


class DecodeIteration(msgspec.Struct):
    """An iteration of a decode instance."""

    end_s: float
    duration_s: float
    num_tokens: int
    max_length: int
    mean_length: float
    # The number of the running batch, and whether requests of others or of none ran beside it: see DecodeReport.
    batch: int
    is_mixed: bool
    scheduling_s: float | None


class Lifetimes:
    """An observer of the router."""

    def __init__(self) -> None:
        self.events: dict[RequestKey, list[LifeEvent]] = defaultdict(list)
        self.iterations: dict[InstanceId, list[DecodeIteration]] = defaultdict(list)

    def __call__(self, now: float, event: Event, sends: list[Send]) -> None:
        if isinstance(event, Received):
            self._received(now, event.sender, event.message)
        for send in sends:
            self._sent(now, send.message)

    def times(self, name: str) -> list[float]:
        """Returns the times of all requests' events with this name, in order within a request."""
        return [event.time_s for events in self.events.values() for event in events if event.name == name]

    def count(self, name: str) -> int:
        return len(self.times(name))

    def _note(self, now: float, name: str, keys: Iterable[RequestKey]) -> None:
        for key in keys:
            self.events[key].append(LifeEvent(now, name))

    def _sent(self, now: float, message: AnyMessage) -> None:
        match message:
            case Prefill():
                self._note(now, "prefill begins", (work.request.key for work in message.works))
            case Stage():
                self._note(now, "stage begins", (work.request.key for work in message.works))
            case Offer():
                self._note(now, "offered", (work.request.key for work in message.works))
            case _:
                pass

    def _received(self, now: float, sender: InstanceId, message: AnyMessage) -> None:
        match message:
            case Submit():
                self._note(now, "arrived", [message.request.key])
            case PrefillReport():
                self._news(now, message.news)
                self._note(now, "saved", (key for key, _ in message.saved))
                self._note(now, "staged", message.staged)
            case DecodeReport():
                self._news(now, message.news)
                self._note(now, "admitted", message.admitted)
                if message.evicted:
                    self._note(now, "evicted", (key for key, _ in message.evicted))
                self._note(now, "dropped", message.dropped)
                self._iteration(now, sender, message)
            case _:
                pass

    def _news(self, now: float, all_news: list[NewTokens]) -> None:
        for news in all_news:
            if not news.first:
                self._note(now, "first token", [news.key])
            if news.finish_reason:
                self._note(now, "finished", [news.key])

    def _iteration(self, now: float, sender: InstanceId, report: DecodeReport) -> None:
        if report.news and report.num_running:
            mean_length = report.sum_lengths / report.num_running
            self.iterations[sender].append(
                DecodeIteration(
                    now,
                    report.duration_s,
                    len(report.news),
                    report.max_length,
                    mean_length,
                    report.batch,
                    report.is_mixed,
                    report.scheduling_s,
                )
            )
