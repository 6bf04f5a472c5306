"""How long the next iteration will take: the cost model, corrected by how long the last ones took. Pure.

The cost model covers the engine. What an instance does beside it in an iteration (plans, messages, starting copies)
comes on top, and hardly depends on what is in the iteration. Copies from the pool have a ratio of their own: computing
beside them slows them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Sequence

from alignedserve.timing.cost import ChunkCosts, CostModel

# Both corrections move towards recent measurements by this share.
_WEIGHT = 0.1
# The recent measurement is the median of so many, an odd number, which leaves out interrupted iterations.
_WINDOW = 5
# A ratio that is further off than this, either way, is taken to be off by this much.
_MOST_OFF = 4.0
# All but this share of the recent iterations ended within `overrun` times what was predicted, and how many these are at
# least and at most.
_RARE = 0.01
_LEAST, _MEMORY = 20, 200
# The cost of a decode that is alone is remembered for this number of lengths.
_MAX_REMEMBERED = 4096


class Estimate:
    def __init__(self, model: CostModel) -> None:
        self._model = model
        # The cost model's seconds for a decode that is alone, by the number of tokens before it.
        self._alone_s: dict[int, float] = {}
        # The recent ratio of measured to modelled time in the engine.
        self.pace = 1.0
        # The recent ratio of measured to modelled time of copies from the pool.
        self.fetch_pace = 1.0
        # The recent seconds per iteration outside the engine.
        self.outside_s = 0.0
        # How much longer than predicted all but the rare ones of the recent iterations took, as a ratio; at least 1.
        # Where others use the processor too, it is far above 1.
        self.overrun = 1.0
        # The same ratio of the last iteration alone.
        self.last_overrun = 1.0
        # The recent ratios of measured to predicted time, in the order in which they came, and the largest last.
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

    def alone(self, num_tokens: int) -> float:
        """The seconds of an iteration with a single decode after `num_tokens` tokens."""
        model_s = self._alone_s.get(num_tokens)
        if model_s is None:
            if len(self._alone_s) >= _MAX_REMEMBERED:
                self._alone_s.clear()
            model_s = self._alone_s[num_tokens] = self._model.iteration([], [num_tokens])
        return self.corrected(model_s)

    @property
    def restored_token_s(self) -> float:
        """The seconds by which each token that is kept as inputs makes an iteration longer."""
        return self._model.restoring(1) * self.pace

    def fetch(self, num_tokens: int) -> float:
        """The seconds in which the KV of `num_tokens` tokens comes from the pool, corrected."""
        num_bytes = int(num_tokens * self._model.pool_bytes_per_token)
        return self._model.channels.fetch.seconds(num_bytes) * self.fetch_pace

    def one_more_chunk(
        self, chunks: Sequence[tuple[int, int]], lengths: Sequence[int]
    ) -> Callable[[int, int], float]:
        """Returns a function of one more chunk: of the number of tokens computed before, and to compute. The function
        returns what `iteration` does for that chunk and all these, and takes less time where many chunks are tried."""
        costs = self._model.one_more_chunk(chunks, lengths)
        return lambda before, count: self.corrected(costs.seconds_with(before, count))

    def first_decodes(
        self, chunks: Sequence[tuple[int, int]], lengths: Sequence[int]
    ) -> Callable[[int], float]:
        """Returns a function of the number of decodes. The function returns what `iteration` does for these chunks and
        that number of the first decodes, and takes less time where many numbers are tried."""
        costs = self._model.first_decodes(chunks, lengths)
        return lambda num_decodes: self.corrected(costs.seconds(num_decodes))

    def chunks_together(self) -> ChunkCosts:
        """Costs by the cost model alone: see `corrected`."""
        return self._model.chunks_together()

    def corrected(self, model_s: float) -> float:
        """Corrects seconds of the cost model the way `iteration` does."""
        return model_s * self.pace + self.outside_s

    def took(self, predicted_s: float, seconds: float, outside_s: float = 0.0) -> None:
        """Reports an iteration which took `seconds` and was predicted since the last report, and the seconds of it
        that were outside the engine."""
        inside_s = predicted_s - self.outside_s
        if inside_s <= 0:
            return
        self.last_overrun = seconds / predicted_s
        self._overran(self.last_overrun)
        off = min(max((seconds - outside_s) / inside_s, 1 / _MOST_OFF), _MOST_OFF)
        self._last.append(off * self.pace)
        self._last_outside_s.append(min(outside_s, _MOST_OFF * max(self.outside_s, inside_s)))
        # With few measurements the lower of the middle two counts: the first may well have been slow.
        self.pace += _WEIGHT * (_median_low(self._last) - self.pace)
        self.outside_s += _WEIGHT * (_median_low(self._last_outside_s) - self.outside_s)

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """Reports a copy from the pool. Copies that are taken to be free stay so."""
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


def _median_low(numbers: Collection[float]) -> float:
    return sorted(numbers)[(len(numbers) - 1) // 2]
