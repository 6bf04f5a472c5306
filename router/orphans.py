"""KV in the pool of requests unknown to the router. Their gateways submit them again, or the KV is released."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.protocol.kv_span import KvSpan
from alignedserve.protocol.messages import Stored
from alignedserve.router.clock import Clock
from alignedserve.types import RequestKey


@dataclass(frozen=True, slots=True)
class _Orphan:
    stored: Stored
    span: KvSpan
    # When it was found: seconds on the router's clock.
    since_s: float


class Orphans:
    def __init__(self, clock: Clock, patience_s: float) -> None:
        """`patience_s`: seconds after which an orphan expires."""
        self._clock = clock
        self._patience_s = patience_s
        self._found: dict[RequestKey, _Orphan] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, stored: Stored, span: KvSpan) -> None:
        """Adds an orphan. `span`: which blocks are saved for a given number of tokens."""
        self._found[stored.key] = _Orphan(stored, span, self._clock.now)

    def claim(self, key: RequestKey, num_tokens: int) -> Stored | None:
        """Returns the KV from which a submitted request of `num_tokens` tokens continues; it is no longer an orphan. An
        earlier router may have received more of its tokens than the gateway did. Blocks that were only reserved do not
        count, because an instance may still be filling them."""
        orphan = self._found.get(key)
        if orphan is None or not orphan.stored.num_tokens:
            return None
        del self._found[key]
        stored = orphan.stored
        return Stored(key, stored.blocks, orphan.span.num_usable(stored.num_tokens, num_tokens))

    def drop(self, key: RequestKey) -> None:
        """Removes an orphan of which the pool no longer has anything. Safe to repeat."""
        self._found.pop(key, None)

    def take_expired(self) -> list[RequestKey]:
        if not self._found:
            return []
        now = self._clock.now
        expired = [key for key, orphan in self._found.items() if now - orphan.since_s >= self._patience_s]
        for key in expired:
            del self._found[key]
        return expired
