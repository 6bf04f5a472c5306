"""How long the next iteration will take: the cost model, corrected by the durations of the last ones. Pure.

The cost model covers the engine. An instance's other work in an iteration (plans, messages, starting copies) is added.
It hardly depends on the contents of the iteration. Copies from the pool have a correction of their own, because
computation beside them slows them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Sequence

from alignedserve.timing.cost import ChunkCosts, CostModel

# Both corrections move towards recent measurements by this share.
_WEIGHT = 0.1
# The recent measurement is the median of this many. The number is odd; the median ignores interrupted iterations.
_WINDOW = 5
# A ratio that is further off than this, in either direction, counts as this.
_MOST_OFF = 4.0
# `overrun` covers all recent iterations except this share. `_LEAST` and `_MEMORY`: how many of them it needs and keeps.
_RARE = 0.01
_LEAST, _MEMORY = 20, 200
# Lengths for which the cost of a single decode is cached.
_MAX_REMEMBERED = 4096


class Estimate:
    def __init__(self, model: CostModel) -> None:
        self._model = model
        # The cost model's seconds for a single decode, by the number of tokens before it.
        self._alone_s: dict[int, float] = {}
        # The recent ratio of measured to modelled time in the engine.
        self.pace = 1.0
        # The recent ratio of measured to modelled time of copies from the pool.
        self.fetch_pace = 1.0
        # Recent seconds per iteration outside the engine.
        self.outside_s = 0.0
        # The ratio of measured to predicted time that nearly all recent iterations stayed within; at least 1. It is far
        # above 1 if other processes use the processor, too.
        self.overrun = 1.0
        # The same ratio for the last iteration alone.
        self.last_overrun = 1.0
        # Recent ratios of measured to predicted time: in order of arrival, and sorted.
        self._ratios: deque[float] = deque()
        self._sorted_ratios: list[float] = []
        self._last: deque[float] = deque(maxlen=_WINDOW)
        self._last_outside_s: deque[float] = deque(maxlen=_WINDOW)
        self._last_fetches: deque[float] = deque(maxlen=_WINDOW)

    def iteration(
        self, chunks: Sequence[tuple[int, int]], lengths: Sequence[int], num_restored: int = 0
    ) -> float:
        """The seconds of `CostModel.iteration`, corrected."""
        return self.corrected(self._model.iteration(chunks, lengths, num_restored))

    def chunk(self, before: int, count: int) -> float:
        """Seconds in the engine of an iteration with a single chunk of `count` tokens, after that many."""
        return self._model.iteration([(before, count)], []) * self.pace

    def alone(self, num_tokens: int) -> float:
        """Seconds of an iteration with a single decode after `num_tokens` tokens."""
        model_s = self._alone_s.get(num_tokens)
        if model_s is None:
            if len(self._alone_s) >= _MAX_REMEMBERED:
                self._alone_s.clear()
            model_s = self._alone_s[num_tokens] = self._model.iteration([], [num_tokens])
        return self.corrected(model_s)

    @property
    def shared_saving(self) -> float:
        """See `CostModel`."""
        return self._model.shared_saving

    @property
    def restored_token_s(self) -> float:
        """Seconds by which each token with kept inputs prolongs an iteration."""
        return self._model.restoring(1) * self.pace

    def fetch(self, num_tokens: int) -> float:
        """Seconds in which the KV of `num_tokens` tokens arrives from the pool, corrected."""
        num_bytes = int(num_tokens * self._model.pool_bytes_per_token)
        return self._model.channels.fetch.seconds(num_bytes) * self.fetch_pace

    def one_more_chunk(
        self, chunks: Sequence[tuple[int, int]], lengths: Sequence[int]
    ) -> Callable[[int, int], float]:
        """Returns a function of (tokens computed before, tokens to compute) of one more chunk.

        Its result equals `iteration` for that chunk and all these. It takes less time when many chunks are tried.
        """
        costs = self._model.one_more_chunk(chunks, lengths)
        return lambda before, count: self.corrected(costs.seconds_with(before, count))

    def first_decodes(
        self, chunks: Sequence[tuple[int, int]], lengths: Sequence[int]
    ) -> Callable[[int], float]:
        """Returns a function of the number of decodes.

        Its result equals `iteration` for these chunks and that number of the first decodes. It takes less time when
        many numbers are tried.
        """
        costs = self._model.first_decodes(chunks, lengths)
        return lambda num_decodes: self.corrected(costs.seconds(num_decodes))

    def chunks_together(self) -> ChunkCosts:
        """Costs by the cost model alone: see `corrected`."""
        return self._model.chunks_together()

    def corrected(self, model_s: float) -> float:
        """Corrects seconds of the cost model in the way of `iteration`."""
        return model_s * self.pace + self.outside_s

    def took(self, predicted_s: float, seconds: float, outside_s: float = 0.0) -> None:
        """Reports an iteration that took `seconds`, `outside_s` of them outside the engine. It must have been predicted
        since the last report."""
        inside_s = predicted_s - self.outside_s
        if inside_s <= 0:
            return
        self.last_overrun = seconds / predicted_s
        self._overran(self.last_overrun)
        off = min(max((seconds - outside_s) / inside_s, 1 / _MOST_OFF), _MOST_OFF)
        self._last.append(off * self.pace)
        self._last_outside_s.append(min(outside_s, _MOST_OFF * max(self.outside_s, inside_s)))
        # With few measurements the lower of the middle two counts, because the first one may well have been slow.
        self.pace += _WEIGHT * (_median_low(self._last) - self.pace)
        self.outside_s += _WEIGHT * (_median_low(self._last_outside_s) - self.outside_s)

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """Reports a copy from the pool. Copies that count as free stay free."""
        predicted_s = self._model.channels.fetch.seconds(num_bytes) * self.fetch_pace
        if self._model.has_free_copies or predicted_s <= 0:
            return
        off = min(max(seconds / predicted_s, 1 / _MOST_OFF), _MOST_OFF)
        self._last_fetches.append(off * self.fetch_pace)
        self.fetch_pace += _WEIGHT * (_median_low(self._last_fetches) - self.fetch_pace)

    def _overran(self, ratio: float) -> None:
        self._ratios.append(ratio)
        insort(self._sorted_ratios, ratio)
        if len(self._ratios) > _MEMORY:
            del self._sorted_ratios[bisect_left(self._sorted_ratios, self._ratios.popleft())]
        if len(self._ratios) >= _LEAST:
            most = self._sorted_ratios[int((1 - _RARE) * (len(self._ratios) - 1))]
            self.overrun = min(max(most, 1.0), _MOST_OFF)


def num_enough(most: int, seconds: Callable[[int], float], share: float) -> int:
    """Returns the smallest number of items with which an iteration has `share` of the pace of one with `most` items.

    The pace is items per second. `seconds(count)` returns the length of an iteration with `count` items. It has to grow
    with `count`, and the time per item has to fall.
    """
    least_pace = share * most / seconds(most)
    return bisect_left(range(1, most), least_pace, key=lambda count: count / seconds(count)) + 1


def _median_low(numbers: Collection[float]) -> float:
    return sorted(numbers)[(len(numbers) - 1) // 2]
