"""Prompts with a common prefix: the hashes that show it, and which instances or islands may have its KV. Pure."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from alignedserve.protocol.messages import Request

# ---- block hashes ----------------------------------------------------------------------------------------------------

# Equal tokens have equal hashes, so these identify common prefixes.
#
# A block's hash covers all tokens up to its end and the request's adapter, because the block's keys and values depend
# on all of them.


# In tokens. Computing fewer common tokens twice, beside other work, takes no longer than waiting for an iteration.
LEAST_COMMON = 64


def pays_to_wait(num_common: int, num_missing: int) -> bool:
    """Returns whether a prompt should wait for another one with the same prefix. `num_common`: those of its
    `num_missing` tokens that the other prompt computes next."""
    return num_common >= max(LEAST_COMMON, num_missing / 2)


# No text begins with this byte in UTF-8.
_ADAPTER_FOLLOWS = b"\xff"


def block_hashes_of(tokens: Sequence[int], block_size: int, salt: str = "", adapter: str = "") -> list[bytes]:
    """Returns the hashes of all full blocks. Only prompts with the same salt and the same adapter have hashes in
    common."""
    return BlockHasher(block_size, salt, adapter).block_hashes_of(tokens)


class BlockHasher:
    """Hashes a request's blocks one after the other, as its tokens arrive."""

    def __init__(self, block_size: int, salt: str = "", adapter: str = "") -> None:
        self._num_bytes = block_size * array("i").itemsize
        # All digests have the same length, so no salt can pass for another salt with tokens or an adapter's name
        # appended.
        first = hashlib.sha256(salt.encode()).digest()
        if adapter:
            first = hashlib.sha256(_ADAPTER_FOLLOWS + first + adapter.encode()).digest()
        self._digest = hashlib.sha256(first)

    def block_hashes_of(self, tokens: Sequence[int]) -> list[bytes]:
        """Returns the hashes of the next full blocks. Tokens after them must be passed again."""
        data, size, names = array("i", tokens).tobytes(), self._num_bytes, []
        for end in range(size, len(data) + 1, size):
            self._digest.update(data[end - size : end])
            names.append(self._digest.digest())
        return names


# ---- where the KV may be ---------------------------------------------------------------------------------------------


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


def prefix_group(hashes: Sequence[bytes]) -> int:
    """Returns a number that prompts have in common if they begin alike for about half of their length, and are about as
    long; 0 for a prompt without hashes. Halves are rounded down to powers of two, so that a few tokens more or less
    seldom change them."""
    if not hashes:
        return 0
    half = max(len(hashes) // 2, 1)
    block_hash = hashes[(1 << (half.bit_length() - 1)) - 1]
    # Messages have numbers of 63 bits.
    return int.from_bytes(block_hash[:8]) >> 1


def num_to_compute(num_missing: int, num_known: int) -> int:
    """Returns how many of these missing tokens an instance is expected to compute, if it may have the KV of `num_known`
    of them."""
    return max(num_missing - num_known, int(LEAST_WORK * num_missing), 1)


class PrefixAffinity:
    """Which prefixes an instance or an island may have the KV of, judging by the prompts that were sent to it. Pure.

    The instance is not asked. If it has dropped the KV meanwhile, it computes it again, as another instance would. KV
    that it is still computing will be there for prompts that come now."""

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
