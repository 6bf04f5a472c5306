"""KV in the pool whose request the router does not know: its gateway submits it again, or the KV goes."""

from __future__ import annotations

from alignedserve.protocol.messages import Stored
from alignedserve.router.clock import Clock
from alignedserve.types import RequestKey


class Orphans:
    def __init__(self, clock: Clock, patience_s: float) -> None:
        """`patience_s`: seconds after which an orphan has expired."""
        self._clock = clock
        self._patience_s = patience_s
        # The KV of each, and the seconds on the router's clock at which it was found.
        self._found: dict[RequestKey, tuple[float, Stored]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, stored: Stored) -> None:
        self._found[stored.key] = (self._clock.now, stored)

    def claim(self, key: RequestKey) -> Stored | None:
        """Returns the KV of a request that was submitted, which is an orphan no more. Blocks that were only reserved do
        not count: an instance that was to fill them may be at it still."""
        _, stored = self._found.get(key, (0.0, None))
        return self._found.pop(key)[1] if stored and stored.num_tokens else None

    def drop(self, key: RequestKey) -> None:
        """The pool has nothing of it any more. It is safe to repeat this."""
        self._found.pop(key, None)

    def take_expired(self) -> list[RequestKey]:
        now = self._clock.now
        expired = [key for key, (since_s, _) in self._found.items() if now - since_s >= self._patience_s]
        for key in expired:
            del self._found[key]
        return expired
