"""KV that prompts with the same prefix may share, as a schedule sees it. Pure; `prefix_cache.py` finds it.

Among concurrent prompts with the same prefix, one computes the prefix, and the others wait and then share it. Such
prompts come from a call with several choices, and from batch jobs with a common system prompt or document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, Protocol

from alignedserve.protocol.messages import Work
from alignedserve.scheduling.prefixes import pays_to_wait
from alignedserve.types import RequestKey


class PrefixLookup(Protocol):
    """The KV that an instance keeps for prompts with the same prefix."""

    def block_hashes(self, work: Work) -> Sequence[bytes]:
        """Returns the hashes of the prompt's first blocks, which it may share."""

    def num_found(self, block_hashes: Sequence[bytes], num_cached: int = 0) -> int:
        """Returns the number of tokens with KV on the instance now. `num_cached`: those with KV in the pool."""

    def take(self, work: Work, max_blocks: int | None = None) -> int:
        """Has a starting prompt hold its shared blocks, at most `max_blocks`. Returns the number of tokens that they
        cover."""


class SharedBlocks(PrefixLookup, Protocol):
    """The same on an instance that decodes. There, a block that several requests hold counts once."""

    def expect(self, work: Work) -> None:
        """Prepares for `take_arriving` of a request with KV in the pool or on another instance."""

    def take_arriving(self, work: Work) -> int:
        """Has such a request, which is admitted, hold its shared blocks. Returns the number of tokens that they cover:
        their KV need not be copied."""

    def has_as_much(self, work: Work) -> bool:
        """Returns whether all KV that a first request would get from the pool is on the instance now."""

    def missing(self, work: Work) -> Sequence[bytes]:
        """Returns the hashes of the full blocks with KV that such a request has to get."""

    def num_held(self, work: Work) -> int:
        """Returns the number of blocks that the request would hold together with others if it began now."""

    def num_shared(self, key: RequestKey) -> int:
        """Returns the number of the request's blocks that others hold as well."""

    def num_read_by_others(self, key: RequestKey) -> float:
        """Returns the number of the request's columns that others read for it, if each block is read once."""

    @property
    def num_repeated(self) -> int:
        """The number of blocks that sharing saves."""

    def dropped(self, key: RequestKey) -> None:
        """Call it during a plan that drops the request, after its blocks have been counted as free."""


class NoPrefixCache:
    def block_hashes(self, work: Work) -> Sequence[bytes]:
        return ()

    def num_found(self, block_hashes: Sequence[bytes], num_cached: int = 0) -> int:
        return 0

    def take(self, work: Work, max_blocks: int | None = None) -> int:
        return 0

    def expect(self, work: Work) -> None:
        pass

    def take_arriving(self, work: Work) -> int:
        return 0

    def has_as_much(self, work: Work) -> bool:
        return False

    def missing(self, work: Work) -> Sequence[bytes]:
        return ()

    def num_held(self, work: Work) -> int:
        return 0

    def num_shared(self, key: RequestKey) -> int:
        return 0

    def num_read_by_others(self, key: RequestKey) -> float:
        return 0.0

    @property
    def num_repeated(self) -> int:
        return 0

    def dropped(self, key: RequestKey) -> None:
        pass


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
    def __init__(self, block_size: int, lookup: PrefixLookup, is_ahead: IsAhead) -> None:
        self._block_size = block_size
        self._lookup = lookup
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
        num_here = self._lookup.num_found(request.block_hashes, request.num_computed)
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
