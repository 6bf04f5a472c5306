"""Turns of the owners of API keys among requests that wait at an instance, and how long iterations are. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.timing.estimate import Estimate

AnyRequest = TypeVar("AnyRequest")


def in_turn(
    waiting: Iterable[AnyRequest],
    begun: Iterable[AnyRequest],
    owner_of: Callable[[AnyRequest], object],
    last_of: Callable[[AnyRequest], int] = lambda _: 0,
) -> list[AnyRequest]:
    """Returns the waiting requests in their order, except that one of an owner that has less here goes first, as if
    each request before it had begun. If both have as many, the one with less of `last_of` goes first. `owner_of`
    returns what counts together."""
    num_here = Counter(map(owner_of, begun))

    def place(request: AnyRequest) -> tuple[int, int]:
        num_here[owner_of(request)] += 1
        return num_here[owner_of(request)], last_of(request)

    return sorted(waiting, key=place)


# Seconds for which an owner that had prompts is expected again.
_RECENT_S = 10.0
# The length of an iteration where several owners are expected, in iterations of one token. A fifth of it is then its
# fixed part, which is what short iterations cost.
_MOST_TIMES = 5.0


class IterationLength:
    """How many tokens of prompts an iteration computes. It can't be interrupted, so it is short if several owners are
    expected."""

    def __init__(self, limits: InstanceLimits, estimate: Estimate | None) -> None:
        self._limits = limits
        self._estimate = estimate
        self._seen_s: dict[str, float] = {}

    def most_tokens(self, missing: Mapping[str, int], now: float) -> int:
        """`missing`: the tokens that each owner's prompts here still lack."""
        self._seen_s |= dict.fromkeys(missing, now)
        self._seen_s = {each: at_s for each, at_s in self._seen_s.items() if now - at_s < _RECENT_S}
        if len(self._seen_s) < 2:
            return self._limits.max_num_batched_tokens
        most = self._short
        num_others = sum(missing.values()) - max(missing.values(), default=0)
        # One with little waits for the others' tokens in its own iteration, too.
        return min(most, max(2 * num_others, self._in_blocks(most // 2))) if num_others else most

    @property
    def _short(self) -> int:
        """The most tokens of a short iteration. Each token takes about as long as another."""
        most = self._limits.max_num_batched_tokens
        if self._estimate is None:
            return most
        least_s, whole_s = (self._estimate.iteration([(0, num_tokens)], []) for num_tokens in (1, most))
        spare_s = (_MOST_TIMES - 1) * least_s
        return self._in_blocks(int(spare_s * most / max(whole_s - least_s, spare_s)))

    def _in_blocks(self, num_tokens: int) -> int:
        block_size = self._limits.block_size
        return min(max(num_tokens // block_size, 1) * block_size, self._limits.max_num_batched_tokens)
