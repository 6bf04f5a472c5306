"""What prompts began with that a prefill instance was given: it may have their KV still. Pure.

Nobody asks it: what it has let go meanwhile is computed again, there as elsewhere. And what it is still computing it
will have for those that come now.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from alignedserve.protocol.messages import Request
from alignedserve.scheduling.block_hashes import names_of

# Tokens of one name: a few blocks, so that a long prompt costs the router little.
TOKENS_PER_HASH = 64


def block_hashes(request: Request) -> list[bytes]:
    """None, where all of the prompt is computed in any case."""
    if request.params.prompt_logprobs is not None:
        return []
    return names_of(request.prompt, TOKENS_PER_HASH, request.cache_salt)


class PrefixAffinity:
    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: more than these it can't have."""
        self._max_hashes = max_tokens // TOKENS_PER_HASH
        # the one that was not seen for longest is first
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def num_cached_tokens(self, hashes: Sequence[bytes]) -> int:
        """That it may have."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self._hashes:
                break
            count += TOKENS_PER_HASH
        return count

    def add(self, hashes: Sequence[bytes]) -> None:
        # a prompt's end is forgotten first: nothing is found of what has lost its beginning
        for block_hash in reversed(hashes):
            self._hashes[block_hash] = None
            self._hashes.move_to_end(block_hash)
        while len(self._hashes) > self._max_hashes:
            self._hashes.popitem(last=False)
