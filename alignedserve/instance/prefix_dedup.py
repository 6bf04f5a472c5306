"""Prompts that wait for others with the same prefix. Pure; `prefix_cache.py` finds what is on the instance already.

Among concurrent prompts with the same prefix, one computes the prefix, and the others wait and then share it. Such
prompts come from a call with several choices, and from batch jobs with a common system prompt or document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, Protocol

from alignedserve.instance.prefix_cache import PrefixCache
from alignedserve.scheduling.prefixes import pays_to_wait
from alignedserve.types import RequestKey


class Member(Protocol):
    """A prompt, as its schedule sees it."""

    # Whether it waits for another request with the same prefix.
    is_following: bool

    @property
    def key(self) -> RequestKey: ...

    @property
    def is_rt(self) -> bool: ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The hashes of the first blocks, which it may share."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_computed(self) -> int: ...


# Arguments: a running and a waiting prompt with a common prefix, and the time. Returns whether the first will have
# computed that prefix before the second could.
IsAhead = Callable[[Any, Any, float], bool]


class PrefixDedup:
    def __init__(self, block_size: int, prefix_cache: PrefixCache, is_ahead: IsAhead) -> None:
        self._block_size = block_size
        self._prefix_cache = prefix_cache
        self._is_ahead = is_ahead
        self._now = 0.0
        # The blocks that are still to be computed, by hash, and the request that computes each.
        self._coming: dict[bytes, Member] = {}

    def look(self, computing: Iterable[Member], now: float) -> None:
        """Records which blocks the running prompts will compute. Call it before a plan, with the most urgent prompt
        first."""
        self._now = now
        self._coming.clear()
        for request in computing:
            self.started(request)

    def started(self, request: Member) -> None:
        for name in request.block_hashes[request.num_computed // self._block_size :]:
            other = self._coming.setdefault(name, request)
            if request.is_rt and not other.is_rt:
                # RT does not wait for BE. Other RT requests follow the RT request.
                self._coming[name] = request

    def dropped(self, request: Member) -> None:
        """Removes a request that computes no more."""
        for name in request.block_hashes:
            if self._coming.get(name) is request:
                del self._coming[name]

    def should_wait(self, request: Member) -> bool:
        """Returns whether a running prompt will have computed enough of this request's prefix, or is still computing
        what the request has begun to wait for."""
        if not (self._coming and request.block_hashes):
            return False
        num_here = self._prefix_cache.num_found(request.block_hashes, request.num_computed)
        num_found = max(num_here, request.num_computed)
        num_coming = self._num_coming(request, request.block_hashes[num_found // self._block_size :])
        pays = pays_to_wait(num_coming, request.num_tokens - num_found)
        request.is_following = pays or (request.is_following and num_coming > 0)
        return request.is_following

    def _num_coming(self, request: Member, missing: Sequence[bytes]) -> int:
        """Returns the number of tokens, from the first of these blocks on, that others will have computed before the
        request could."""
        is_ahead: dict[RequestKey, bool] = {}

        def is_coming(name: bytes) -> bool:
            other = self._coming.get(name)
            if other is None:
                return False
            if other.key not in is_ahead:
                is_ahead[other.key] = self._is_ahead(other, request, self._now)
            return is_ahead[other.key]

        return self._block_size * sum(1 for _ in takewhile(is_coming, missing))
