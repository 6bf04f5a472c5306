"""Turns of the owners of API keys among requests at an instance, and how long its iterations are. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.timing.estimate import Estimate, num_enough

AnyRequest = TypeVar("AnyRequest")


def in_turn(
    requests: Iterable[AnyRequest],
    owner_of: Callable[[AnyRequest], Hashable],
    had: Mapping[Hashable, float],
    size_of: Callable[[AnyRequest], float] = lambda _: 1,
) -> list[AnyRequest]:
    """Returns the requests in their order, except that one of an owner that has had less goes first. An owner has had
    each of its requests before it, too. `owner_of` returns what counts together."""
    total = defaultdict[Hashable, float](float, had)

    def before(request: AnyRequest) -> float:
        owner = owner_of(request)
        total[owner] += size_of(request)
        return total[owner] - size_of(request)

    return sorted(requests, key=before)


# What is smaller than this share of a token was long ago: about 340 iterations.
_FORGOTTEN = 1e-100


class RecentTokens:
    """The tokens that iterations have computed for each owner. With each later iteration, they count half as much: so
    an owner has its turn soon, whatever it had long ago, and one that comes and goes has no advantage."""

    def __init__(self) -> None:
        self.of: dict[Hashable, float] = {}

    def next_iteration(self) -> None:
        self.of = {owner: recent / 2 for owner, recent in self.of.items() if recent > _FORGOTTEN}

    def add(self, owner: Hashable, num_tokens: int) -> None:
        self.of[owner] = self.of.get(owner, 0.0) + num_tokens


# Seconds for which an owner that had prompts is expected again.
_RECENT_S = 10.0
# Where several owners are expected, an iteration is long enough for this share of the pace of the longest.
_SHARE_OF_PACE = 0.8


class IterationLength:
    """How many tokens of prompts an iteration computes. It can't be interrupted, so it is short if several owners are
    expected."""

    def __init__(self, limits: InstanceLimits, estimate: Estimate | None) -> None:
        self._limits = limits
        self._estimate = estimate
        self._seen_s: dict[str, float] = {}

    def most_tokens(self, missing: Counter[str], furthest: int, now: float) -> int:
        """`missing`: the tokens that each owner's prompts here still lack. `furthest`: the most that one has."""
        self._seen_s |= dict.fromkeys(missing, now)
        self._seen_s = {each: at_s for each, at_s in self._seen_s.items() if now - at_s < _RECENT_S}
        if len(self._seen_s) < 2:
            return self._limits.max_num_batched_tokens
        most = self._short(furthest)
        num_others = missing.total() - max(missing.values(), default=0)
        # One with little waits for the others' tokens in its own iteration, too.
        return min(most, max(2 * num_others, self._in_blocks(most // 2))) if num_others else most

    def _short(self, furthest: int) -> int:
        """The fewest tokens that pay."""
        most = self._limits.max_num_batched_tokens // self._limits.block_size
        if self._estimate is None or not most:
            return self._limits.max_num_batched_tokens
        seconds = self._estimate.chunk
        before = min(furthest, self._limits.max_model_len - 1)
        # Otherwise it would be longer with more requests, which take time outside the engine, and then have more.
        outside_s = min(self._estimate.outside_s, seconds(before, 1))
        size = self._limits.block_size
        return self._in_blocks(
            size * num_enough(most, lambda count: seconds(before, count * size) + outside_s, _SHARE_OF_PACE)
        )

    def _in_blocks(self, num_tokens: int) -> int:
        block_size = self._limits.block_size
        return min(max(num_tokens // block_size, 1) * block_size, self._limits.max_num_batched_tokens)
