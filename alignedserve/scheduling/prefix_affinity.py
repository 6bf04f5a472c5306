"""Which prefixes an instance or an island may have the KV of, judging by the prompts that were sent to it. Pure.

The instance is not asked. If it has dropped the KV meanwhile, it computes it again, as another instance would. KV that
it is still computing will be there for prompts that come now.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from alignedserve.protocol.messages import Request
from alignedserve.scheduling.block_hashes import block_hashes_of

# Tokens per hash: a few KV blocks, so that a long prompt costs little.
TOKENS_PER_HASH = 64
# The least share of a prompt that counts as work, even if all of it is cached: the prompt takes room in the pool, and
# goes before later ones.
LEAST_WORK = 0.125


def block_hashes(request: Request) -> list[bytes]:
    """Returns a hash for each full piece of the prompt, over all tokens up to the piece's end. Returns none if the
    whole prompt has to be computed."""
    if request.needs_whole_prompt:
        return []
    return block_hashes_of(request.prompt, TOKENS_PER_HASH, request.cache_salt, request.adapter)


def num_to_compute(num_missing: int, num_known: int) -> int:
    """Returns how many of these missing tokens an instance is expected to compute, if it may have the KV of `num_known`
    of them."""
    return max(num_missing - num_known, int(LEAST_WORK * num_missing), 1)


class PrefixAffinity:
    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: the number of tokens for which the instance has KV blocks."""
        self._max_hashes = max_tokens // TOKENS_PER_HASH
        # Hashes of the prompts that were sent to it, the least recently used first.
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def num_cached_tokens(self, hashes: Sequence[bytes]) -> int:
        """Returns for how many tokens of a prompt with these hashes it may have KV."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self._hashes:
                break
            count += TOKENS_PER_HASH
        return count

    def add(self, hashes: Sequence[bytes]) -> None:
        # A prompt's last hashes are dropped first: without the first ones, the last ones would never be found.
        for block_hash in reversed(hashes):
            self._hashes[block_hash] = None
            self._hashes.move_to_end(block_hash)
        while len(self._hashes) > self._max_hashes:
            self._hashes.popitem(last=False)
