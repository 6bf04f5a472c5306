"""What prompts began with that a prefill instance was given: it may have their KV still. Pure.

Nobody asks it: what it has let go meanwhile is computed again, there as elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.messages import Request
from alignedserve.prefixes import names_of

# Tokens of one name: a few blocks, so that a long prompt costs the router little.
GRAIN = 64
# of an instance: for a million tokens
MAX_NAMES = 1 << 14


def names(request: Request) -> list[bytes]:
    return names_of(request.prompt, GRAIN, request.cache_salt)


class Beginnings:
    def __init__(self) -> None:
        # the one that was not seen for longest is first
        self._names: dict[bytes, None] = {}

    def num_tokens(self, names: Sequence[bytes]) -> int:
        """That it may have."""
        count = 0
        for name in names:
            if name not in self._names:
                break
            count += GRAIN
        return count

    def add(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._names.pop(name, None)
            self._names[name] = None
        while len(self._names) > MAX_NAMES:
            del self._names[next(iter(self._names))]
