"""Turns of the owners of API keys among requests that wait at an instance, and their parts of an iteration. Pure."""

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


class IterationParts:
    """How many tokens of prompts an iteration computes. An iteration can't be interrupted, so it is short where several
    owners are expected. If several have prompts in it, none gets more tokens than all others together."""

    def __init__(self, limits: InstanceLimits, estimate: Estimate | None) -> None:
        self._limits = limits
        self._estimate = estimate
        self._seen_s: dict[str, float] = {}
        # Numbers of owners' last chunks.
        self._last: dict[str, int] = {}
        self._num_chunks = 0

    def planned(self, owner: str) -> None:
        """Some tokens of the owner are in the iteration."""
        self._num_chunks += 1
        self._last[owner] = self._num_chunks

    def last(self, owner: str) -> int:
        """Returns less for an owner that has been in no iteration for longer."""
        return self._last.get(owner, 0)

    def most_tokens(self, pending: Mapping[str, int], now: float) -> int:
        """`pending`: the tokens that owners have here."""
        self._seen_s |= dict.fromkeys(pending, now)
        self._seen_s = {each: at_s for each, at_s in self._seen_s.items() if now - at_s < _RECENT_S}
        self._last = {each: number for each, number in self._last.items() if each in self._seen_s}
        if len(self._seen_s) <= 1:
            return self._limits.max_num_batched_tokens
        num_others = sum(pending.values()) - max(pending.values(), default=0)
        return min(self._short, 2 * num_others) if num_others else self._short

    @property
    def _short(self) -> int:
        """The most tokens of a short iteration, in whole blocks. Each token takes about as long as another."""
        most, block_size = self._limits.max_num_batched_tokens, self._limits.block_size
        if self._estimate is None:
            return most
        least_s, whole_s = (self._estimate.iteration([(0, num_tokens)], []) for num_tokens in (1, most))
        spare_s = (_MOST_TIMES - 1) * (least_s + self._estimate.outside_s)
        num_blocks = int(spare_s * most / max(whole_s - least_s, spare_s)) // block_size
        return min(max(num_blocks, 1) * block_size, most)
