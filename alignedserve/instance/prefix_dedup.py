"""Prompts with the same prefix which are here at the same time: one computes the prefix, the others wait until it is
done, and share it. Pure.

They come from one call with several choices, and from batch jobs whose lines share a system prompt or a document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, Protocol

from alignedserve.instance.prefix_lookup import PrefixLookup
from alignedserve.scheduling.block_hashes import pays_to_wait
from alignedserve.types import RequestKey


class Member(Protocol):
    """A prompt as its schedule sees it."""

    # It waits for another request with the same prefix.
    is_following: bool

    @property
    def key(self) -> RequestKey: ...

    @property
    def is_rt(self) -> bool: ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The hashes of its first blocks, those that it may share."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_computed(self) -> int: ...


# Called with two prompts that share a prefix, one under way and one that waits, and the time: whether the first will
# have computed what both need before the second could.
IsAhead = Callable[[Any, Any, float], bool]


class PrefixDedup:
    def __init__(self, block_size: int, lookup: PrefixLookup, is_ahead: IsAhead) -> None:
        self._block_size = block_size
        self._lookup = lookup
        self._is_ahead = is_ahead
        self._now = 0.0
        # The blocks that are still to be computed, by hash, with the request that computes each.
        self._coming: dict[bytes, Member] = {}

    def look(self, computing: Iterable[Member], now: float) -> None:
        """Notes which blocks the prompts under way will compute; called before a plan, with the most urgent first."""
        self._now = now
        self._coming.clear()
        for request in computing:
            self.started(request)

    def started(self, request: Member) -> None:
        for name in request.block_hashes[request.num_computed // self._block_size :]:
            other = self._coming.setdefault(name, request)
            if request.is_rt and not other.is_rt:
                # Real time does not wait for best effort, and other requests of real time follow the real-time one.
                self._coming[name] = request

    def dropped(self, request: Member) -> None:
        """The request computes nothing any more."""
        for name in request.block_hashes:
            if self._coming.get(name) is request:
                del self._coming[name]

    def had_better_wait(self, request: Member) -> bool:
        """Whether a prompt under way will have computed enough of what the request needs, or is still computing what
        the request began to wait for."""
        if not (self._coming and request.block_hashes):
            return False
        num_found = self._lookup.num_found(request.block_hashes)
        num_coming = self._num_coming(request, request.block_hashes[num_found // self._block_size :])
        pays = pays_to_wait(num_coming, request.num_tokens - num_found)
        request.is_following = pays or (request.is_following and num_coming > 0)
        return request.is_following

    def _num_coming(self, request: Member, missing: Sequence[bytes]) -> int:
        """The number of tokens, from the first of these blocks on, which others will have computed before the request
        could."""
        is_ahead: dict[RequestKey, bool] = {}

        def is_coming(name: bytes) -> bool:
            other = self._coming.get(name)
            if other is None:
                return False
            if other.key not in is_ahead:
                is_ahead[other.key] = self._is_ahead(other, request, self._now)
            return is_ahead[other.key]

        return self._block_size * sum(1 for _ in takewhile(is_coming, missing))
