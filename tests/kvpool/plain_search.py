"""The rules of search.py and batch_expansion.py once more, over a plain list: slow, and one request at a time."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field

from alignedserve.kvpool.batch_builder import BatchLimits
from alignedserve.types import RequestKey

MAX_LENGTH, LEAF_WIDTH, NUM_LEVELS = 65536, 16, 7


@dataclass(frozen=True)
class Pooled:
    key: RequestKey
    # as it was given
    num_tokens: int
    due_s: float
    num_blocks: int

    @property
    def length(self) -> int:
        return min(self.num_tokens, MAX_LENGTH)


@dataclass(frozen=True)
class Range:
    """Lengths low + 1 .. low + width."""

    low: int
    width: int

    def __contains__(self, length: int) -> bool:
        return self.low < length <= self.low + self.width

    @property
    def quarters(self) -> list[Range]:
        width = self.width // 4
        return [Range(self.low + part * width, width) for part in range(4)]

    @property
    def parent(self) -> Range:
        width = self.width * 4
        return Range(self.low // width * width, width)


EVERYTHING = Range(0, MAX_LENGTH)


def leaf_range(length: int) -> Range:
    return Range((length - 1) // LEAF_WIDTH * LEAF_WIDTH, LEAF_WIDTH)


def ranges_of(length: int) -> list[Range]:
    """From everything down to the leaf."""
    ranges = [leaf_range(length)]
    while ranges[0].width < MAX_LENGTH:
        ranges.insert(0, ranges[0].parent)
    return ranges


@dataclass
class PlainIndex:
    block_size: int
    num_full: int = 0
    num_sliding: int = 1
    # of sliding groups, at a time
    max_columns: int | None = None
    # in order of arrival
    pooled: dict[RequestKey, Pooled] = field(default_factory=dict)
    waiting_since_s: dict[Range, float] = field(default_factory=dict)

    def blocks_for(self, length: int) -> int:
        num_columns = math.ceil(length / self.block_size)
        num_held = num_columns if self.max_columns is None else min(num_columns, self.max_columns)
        return self.num_full * num_columns + self.num_sliding * num_held

    def longest(self, max_blocks: int) -> int:
        """Of the lengths that end a column."""
        lengths = range(0, MAX_LENGTH + 1, self.block_size)
        return lengths[bisect_right(lengths, max_blocks, key=self.blocks_for) - 1]

    def insert(self, key: RequestKey, length: int, due_s: float, now: float) -> None:
        request = Pooled(key, length, due_s, self.blocks_for(length))
        for area in ranges_of(request.length):
            if not any(other.length in area for other in self.pooled.values()):
                self.waiting_since_s[area] = now
        self.pooled[key] = request

    def take_batch(self, keys: list[RequestKey], now: float) -> None:
        for key in keys:
            for area in ranges_of(self.pooled.pop(key).length):
                self.waiting_since_s[area] = now


def plain_batch(
    index: PlainIndex,
    limits: BatchLimits,
    urgent_before_s: float = -math.inf,
    starved_before_s: float = -math.inf,
) -> set[RequestKey]:
    """All that could fit by themselves; but a leaf where some do is seen whole, and left out when it gives nothing."""
    last = leaf_range(index.longest(limits.max_blocks))
    while last.low >= 0:
        seen = [each for each in index.pooled.values() if each.length <= last.low + last.width]
        if not seen or limits.max_requests < 1:
            return set()
        if batch := PlainSearch(index, limits, seen).run(urgent_before_s, starved_before_s):
            return {each.key for each in batch}
        last = Range(last.low - LEAF_WIDTH, LEAF_WIDTH)
    return set()


class PlainSearch:
    def __init__(self, index: PlainIndex, limits: BatchLimits, seen: list[Pooled]) -> None:
        self.index, self.limits, self.seen = index, limits, seen
        self.batch: list[Pooled] = []

    def run(self, urgent_before_s: float, starved_before_s: float) -> list[Pooled]:
        area = self.start(urgent_before_s)
        while not self.is_all_fitting(area) and area.width > LEAF_WIDTH:
            area = self.next(area, starved_before_s)
        order = self.within(area)
        if not self.is_all_fitting(area):
            order.sort(key=lambda each: (each.due_s, each.key))
        for each in order:
            if self.has_room(each):
                self.batch.append(each)
        if self.batch and self.num_missing > 0:
            self.expand(area)
        return self.batch

    def start(self, urgent_before_s: float) -> Range:
        earliest = min(each.due_s for each in self.seen)
        if earliest > urgent_before_s:
            return EVERYTHING
        return leaf_range(min(each.length for each in self.seen if each.due_s == earliest))

    def next(self, area: Range, starved_before_s: float) -> Range:
        quarters = [quarter for quarter in area.quarters if self.within(quarter)]
        since = self.index.waiting_since_s
        longest = min(quarters, key=lambda quarter: since[quarter])
        if since[longest] < starved_before_s:
            return longest
        return max(quarters, key=lambda quarter: len(self.within(quarter)))

    def expand(self, node: Range) -> None:
        kept = [each.length for each in self.within(node)]
        low, high = min(kept), max(kept)
        passed_over: list[Pooled] = []
        area = node
        while area.width < MAX_LENGTH:
            area = area.parent
            while not (passed_over and self.num_missing <= 0):
                others = [
                    each
                    for each in self.within(area)
                    if each not in self.batch and each not in passed_over and each.length not in node
                ]
                left = [each for each in others if each.length <= low]
                right = [each for each in others if each.length >= high]
                if not (left or right):
                    break
                to_left = min([low - each.length for each in left], default=math.inf)
                to_right = min([each.length - high for each in right], default=math.inf)
                if to_left <= to_right:
                    nearest = next(each for each in left if low - each.length == to_left)
                else:
                    nearest = next(each for each in right if each.length - high == to_right)
                if not self.has_room(nearest):
                    passed_over.append(nearest)
                    continue
                self.batch.append(nearest)
                low, high = min(low, nearest.length), max(high, nearest.length)

    @property
    def num_missing(self) -> int:
        return self.limits.min_requests - len(self.batch)

    def within(self, area: Range) -> list[Pooled]:
        return [each for each in self.seen if each.length in area]

    def is_all_fitting(self, area: Range) -> bool:
        requests = self.within(area)
        num_blocks = sum(each.num_blocks for each in requests)
        return num_blocks <= self.limits.max_blocks and len(requests) <= self.limits.max_requests

    def has_room(self, request: Pooled) -> bool:
        num_blocks = sum(each.num_blocks for each in self.batch) + request.num_blocks
        return num_blocks <= self.limits.max_blocks and len(self.batch) < self.limits.max_requests
