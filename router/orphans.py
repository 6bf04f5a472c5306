"""KV in the pool whose request the router does not know: its gateway will submit it again, or nobody will."""

from __future__ import annotations

from alignedserve.messages import Stored
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
        _, stored = self._found.pop(key, (0.0, None))
        return stored

    def take_expired(self, now: float) -> list[RequestKey]:
        expired = [key for key, (since, _) in self._found.items() if now - since >= self._patience_s]
        for key in expired:
            del self._found[key]
        return expired
