"""The KV that prompts with the same prefix share: that of their full blocks, running prompts and earlier ones alike.

A block can be shared as soon as its KV is computed, until it is evicted for lack of free blocks (`engine/blocks.py`).
Prompts that bring a cache salt share blocks only with prompts of the same salt, and those with an adapter only with
prompts of the same adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from alignedserve.engine.request import Request
from alignedserve.instance.executor import Executor
from alignedserve.instance.requests import id_of
from alignedserve.protocol.messages import Work
from alignedserve.scheduling.block_hashes import BlockHasher
from alignedserve.types import RequestKey


@dataclass(slots=True)
class HashedPrefix:
    """What is known of a prompt's blocks, by which others may share its KV."""

    # The hashes of its full blocks.
    block_hashes: list[bytes]
    # The number of tokens whose KV was there when it started.
    num_found: int = 0
    # The number of its blocks that others may share.
    num_published: int = 0
    # The tokens after the full blocks, and the number of output tokens that they and the full blocks include.
    tail: list[int] = field(default_factory=list)
    num_output: int = 0
    hasher: BlockHasher | None = None


class PrefixCache:
    """See `prefix_lookup.PrefixLookup`."""

    def __init__(self, engine: Executor, is_enabled: bool, rt_only: bool = False) -> None:
        """`rt_only`: best effort shares no KV."""
        self._engine = engine
        self._rt_only = rt_only
        self.is_enabled = is_enabled
        self._block_size = engine.format.block_size
        # The hashes of the prompts which wait.
        self._waiting: dict[RequestKey, HashedPrefix] = {}
        self._num_asked = self._num_found = 0

    def block_hashes(self, work: Work) -> Sequence[bytes]:
        if not self._is_for(work) or work.num_cached:
            return ()
        prefix = self._waiting[work.request.key] = self._hashed(work)
        return self._usable(work, prefix)

    def num_found(self, block_hashes: Sequence[bytes]) -> int:
        return self._engine.num_known(block_hashes)

    def take(self, work: Work, max_blocks: int | None = None) -> int:
        """Called in the middle of a plan; `start` follows before the next plan."""
        prefix = self._waiting.get(work.request.key)
        if prefix is None:
            return 0
        if usable := self._usable(work, prefix)[:max_blocks]:
            prefix.num_found = self._engine.share(id_of(work.request.key), usable)
            # These blocks are published already, or were and are no longer; either way there is nothing to publish.
            prefix.num_published = prefix.num_found // self._block_size
        if _shares(work):
            self._num_asked += len(work.request.prompt) + len(work.output)
            self._num_found += prefix.num_found
        return prefix.num_found

    def start(self, work: Work, is_shared: bool = True) -> HashedPrefix:
        """If not `is_shared`, the request will have no KV for others."""
        waiting = self._waiting.pop(work.request.key, None)
        if not is_shared:
            return HashedPrefix([])
        return waiting or self._hashed(work)

    def forget(self, key: RequestKey) -> None:
        """Forgets a prompt which will not start, or not soon."""
        self._waiting.pop(key, None)

    def forget_waiting(self) -> None:
        self._waiting.clear()

    def computed(self, request: Request, prefix: HashedPrefix) -> None:
        """More of the request is computed than before, and others may share it."""
        first, end = prefix.num_published, request.num_computed // self._block_size
        if prefix.block_hashes[first:end]:
            self._engine.publish_blocks(request, first, prefix.block_hashes[first:end])
            prefix.num_published = end

    def ended(self, request: Request, prefix: HashedPrefix) -> None:
        """Publishes the output's full blocks as well: the next turn of a chat begins with the last answer."""
        if prefix.hasher is not None:
            num_more = request.num_computed - len(prefix.block_hashes) * self._block_size
            more = [*prefix.tail, *request.output[prefix.num_output :]][: max(num_more, 0)]
            prefix.block_hashes += prefix.hasher.block_hashes_of(more)
            self.computed(request, prefix)

    def spoilt(self, prefix: HashedPrefix) -> None:
        """Publishes the prompt's blocks no longer, since its KV may be wrong."""
        self._engine.forget_hashes(prefix.block_hashes)
        prefix.block_hashes.clear()
        prefix.hasher = None

    def take_counts(self) -> tuple[int, int]:
        """Returns the number of tokens of the prompts that started since the last call, and how many of these had KV
        here."""
        counts, self._num_asked, self._num_found = (self._num_asked, self._num_found), 0, 0
        return counts

    def _is_for(self, work: Work) -> bool:
        return self.is_enabled and (work.deadlines.is_rt or not self._rt_only)

    def _usable(self, work: Work, prefix: HashedPrefix) -> Sequence[bytes]:
        """The hashes of the blocks that the request may share. The last token is always computed, because its logits
        are needed."""
        num_tokens = len(work.request.prompt) + len(work.output)
        return prefix.block_hashes[: (num_tokens - 1) // self._block_size] if _shares(work) else ()

    def _hashed(self, work: Work) -> HashedPrefix:
        wanted = work.request
        if not self._is_for(work):
            return HashedPrefix([])
        tokens = wanted.prompt + work.output
        hasher = BlockHasher(self._block_size, wanted.cache_salt, wanted.adapter)
        block_hashes = hasher.block_hashes_of(tokens)
        tail = tokens[len(block_hashes) * self._block_size :]
        return HashedPrefix(block_hashes, tail=tail, num_output=len(work.output), hasher=hasher)


def _shares(work: Work) -> bool:
    """Whether the request may share KV."""
    return not work.request.needs_whole_prompt or bool(work.output)
