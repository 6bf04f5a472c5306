"""KV in the pool whose request the router does not know: its gateway will submit it again, or nobody will."""

from __future__ import annotations

from alignedserve.protocol.messages import Stored
from alignedserve.types import RequestKey


class Orphans:
    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._found: dict[RequestKey, tuple[float, Stored]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, stored: Stored, now: float) -> None:
        self._found[stored.key] = (now, stored)

    def claim(self, key: RequestKey) -> Stored | None:
        """None as well of one that was only reserved: who was to fill it may be at it still."""
        _, stored = self._found.get(key, (0.0, None))
        return self._found.pop(key)[1] if stored and stored.num_tokens else None

    def drop(self, key: RequestKey) -> None:
        """The pool has nothing of it any more. Safe to repeat."""
        self._found.pop(key, None)

    def take_expired(self, now: float) -> list[RequestKey]:
        expired = [key for key, (since, _) in self._found.items() if now - since >= self._patience_s]
        for key in expired:
            del self._found[key]
        return expired
