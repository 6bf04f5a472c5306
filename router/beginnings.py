"""What prompts began with that a prefill instance was given: it may have their KV still. Pure.

Nobody asks it: what it has let go meanwhile is computed again, there as elsewhere. And what it is still computing it
will have for those that come now.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from alignedserve.protocol.messages import Request
from alignedserve.scheduling.block_hashes import block_hashes_of

# Tokens of one name: a few blocks, so that a long prompt costs the router little.
GRAIN = 64


def names(request: Request) -> list[bytes]:
    """None, where all of the prompt is computed in any case."""
    if request.params.prompt_logprobs is not None:
        return []
    return block_hashes_of(request.prompt, GRAIN, request.cache_salt)


class Beginnings:
    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: more than these it can't have."""
        self._max_names = max_tokens // GRAIN
        # the one that was not seen for longest is first
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def num_tokens(self, names: Sequence[bytes]) -> int:
        """That it may have."""
        count = 0
        for name in names:
            if name not in self._names:
                break
            count += GRAIN
        return count

    def add(self, names: Sequence[bytes]) -> None:
        # a prompt's end is forgotten first: nothing is found of what has lost its beginning
        for name in reversed(names):
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._max_names:
            self._names.popitem(last=False)
