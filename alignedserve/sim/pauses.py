"""How often requests had to stop and continued later, and how much KV was moved for that.

An observer of the router's messages counts four kinds of pauses:

- evicted: it left its decode instance, its KV was kept, and it came back.
- dropped: it left its decode instance without its KV, and came back.
- sat out: it stayed there with its blocks, but the instance ran iterations without it.
- interrupted: its prompt was computed in part, and the instance computed others before it continued.

Consecutive iterations without it count once. A named victim waits for its eviction, so it does not count as sitting
out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from alignedserve.kv.span import KvSpan
from alignedserve.protocol.messages import Abort, AnyMessage, DecodeReport, Evict, Failed, PrefillReport
from alignedserve.router.events import Closed, Event, Received, Send
from alignedserve.types import InstanceId, RequestKey

# For each request, whether it was in the last iteration.
_Members = dict[RequestKey, bool]


class Pauses:
    def __init__(self, span: KvSpan | None = None) -> None:
        """`span`: the blocks of requests, if some of their KV is not held."""
        self._span = span or KvSpan(block_size=1)
        self.evicted: list[RequestKey] = []
        self.dropped: list[RequestKey] = []
        self.sat_out: list[RequestKey] = []
        self.interrupted: list[RequestKey] = []
        # Tokens with KV copied to the pool for evictions, and tokens with KV to copy back. A token counts with
        # the share of layer groups in which its KV is copied.
        self.num_saved_tokens = 0.0
        self.num_fetched_tokens = 0.0
        # Bytes of KV overwritten in blocks shared from both ends, to host memory and back. These are of requests other
        # than the above.
        self.overwritten_bytes = 0
        self._running: defaultdict[InstanceId, _Members] = defaultdict(dict)
        self._prompts: defaultdict[InstanceId, _Members] = defaultdict(dict)
        # For each request with an ordered eviction, the tokens that had KV in the pool by then.
        self._num_in_pool: dict[RequestKey, int] = {}

    @property
    def count(self) -> int:
        return len(self.evicted) + len(self.dropped) + len(self.sat_out) + len(self.interrupted)

    def __call__(self, now: float, event: Event, sends: list[Send]) -> None:
        if isinstance(event, Received):
            self._received(event.sender, event.message)
        elif isinstance(event, Closed):
            self._running.pop(event.instance_id, None)
            self._prompts.pop(event.instance_id, None)
        for send in sends:
            self._sent(send.to, send.message)

    def _sent(self, to: InstanceId, message: AnyMessage) -> None:
        if isinstance(message, Evict):
            self._num_in_pool[message.key] = message.num_saved
        elif isinstance(message, Abort):
            for key in message.keys:
                self._running[to].pop(key, None)
                self._prompts[to].pop(key, None)
                self._num_in_pool.pop(key, None)

    def _received(self, sender: InstanceId, message: AnyMessage) -> None:
        match message:
            case DecodeReport():
                self._decoded(self._running[sender], message)
            case PrefillReport():
                self._prefilled(self._prompts[sender], message)
            case Failed(key, "evict"):
                self._num_in_pool.pop(key, None)
            case _:
                pass

    def _decoded(self, running: _Members, report: DecodeReport) -> None:
        self._dropped(running, report.dropped)
        for moved in report.moved:
            self.overwritten_bytes += moved.num_bytes * (moved.what in ("checkpoint", "restore"))
        if report.news:
            ran = {news.key: True for news in report.news}
            # Most iterations have all requests of the one before.
            if not ran.keys() >= running.keys():
                self.sat_out += _left_out(running, ran, unless=[*report.wants_evicted, *self._num_in_pool])
            running.update(ran)
        for key in report.admitted:
            running[key] = True
        for key in report.wants_evicted:
            if key in running:
                running[key] = False
        for news in report.news:
            if news.finish_reason:
                running.pop(news.key, None)
                self._num_in_pool.pop(news.key, None)
        for key, num_tokens in report.evicted:
            running.pop(key, None)
            self.evicted.append(key)
            self.num_saved_tokens += self._num_moved(num_tokens, self._num_in_pool.pop(key, 0))
            self.num_fetched_tokens += self._num_moved(num_tokens, 0)

    def _num_moved(self, num_tokens: int, num_there: int) -> float:
        """Returns the number of the request's tokens with KV to copy, if the first `num_there` tokens have theirs there
        already."""
        span = self._span
        num_of_full = num_tokens - num_there
        num_of_sliding = num_tokens - max(num_there, span.num_passed(num_tokens) * span.block_size)
        num_blocks = span.num_full_groups * num_of_full + span.num_sliding_groups * num_of_sliding
        return num_blocks / span.num_groups

    def _dropped(self, running: _Members, keys: Iterable[RequestKey]) -> None:
        for key in keys:
            running.pop(key, None)
            self._num_in_pool.pop(key, None)
            self.dropped.append(key)

    def _prefilled(self, prompts: _Members, report: PrefillReport) -> None:
        computed = [key for key, _, _ in report.progress]
        done = {news.key for news in report.news}
        if not computed and not done:
            return
        self.interrupted += _left_out(prompts, {*computed, *done})
        prompts.update(dict.fromkeys(computed, True))
        for key in done:
            prompts.pop(key, None)


def _left_out(
    members: _Members, ran: Collection[RequestKey], unless: Iterable[RequestKey] = ()
) -> list[RequestKey]:
    """Returns the requests that were in the iteration before this one and are not in this one."""
    excused = set(unless)
    left_out = [key for key, was_in in members.items() if was_in and key not in ran and key not in excused]
    members.update(dict.fromkeys(left_out, False))
    return left_out
