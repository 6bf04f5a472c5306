"""Which beginnings of prompts an instance or an island may have the KV of, going by the prompts that it was given.
Pure.

It is not asked. KV that it has dropped meanwhile is computed again, as it would be elsewhere; and KV that it is still
computing will be there for prompts that come now.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from alignedserve.protocol.messages import Request
from alignedserve.scheduling.block_hashes import block_hashes_of

# Each hash stands for so many tokens: that is a few KV blocks, so that a long prompt costs little.
TOKENS_PER_HASH = 64


def block_hashes(request: Request) -> list[bytes]:
    """Returns a hash for each full piece of the prompt, of all tokens up to the piece's end. There are none if all of
    the prompt is computed in any case."""
    if request.needs_whole_prompt:
        return []
    return block_hashes_of(request.prompt, TOKENS_PER_HASH, request.cache_salt, request.adapter)


class PrefixAffinity:
    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: the number of tokens that the instance has KV blocks for."""
        self._max_hashes = max_tokens // TOKENS_PER_HASH
        # Hashes of prompts that it was given, the one that was not used for longest first.
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def num_cached_tokens(self, hashes: Sequence[bytes]) -> int:
        """Returns how many tokens of a prompt with these hashes it may have the KV of."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self._hashes:
                break
            count += TOKENS_PER_HASH
        return count

    def add(self, hashes: Sequence[bytes]) -> None:
        # A prompt's last hashes are dropped first: without the first ones, they would not be found any more.
        for block_hash in reversed(hashes):
            self._hashes[block_hash] = None
            self._hashes.move_to_end(block_hash)
        while len(self._hashes) > self._max_hashes:
            self._hashes.popitem(last=False)
