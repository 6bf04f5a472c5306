"""Lets prompts with the same prefix share KV: that of full blocks, of running and earlier prompts.

A block can be shared from the time its KV is computed until it is evicted for lack of free blocks (`memory.py`).
Prompts with a cache salt share only with prompts of the same salt, and likewise for adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from alignedserve.engine.request import Request
from alignedserve.instance.memory import BlockManager
from alignedserve.kv.held import Held
from alignedserve.protocol.messages import Work
from alignedserve.scheduling.prefixes import BlockHasher
from alignedserve.types import RequestKey


@dataclass(slots=True)
class HashedPrefix:
    """A prompt's blocks and what others may share of them."""

    # Hashes of its full blocks.
    block_hashes: list[bytes]
    # Tokens with KV of other requests when the prompt started: in this instance's blocks, and in all.
    num_shared: int = 0
    num_found: int = 0
    # The same, when a request with KV elsewhere was admitted: these are not copied.
    num_here: int = 0
    # Its first blocks that others may share.
    num_published: int = 0
    # The tokens after the full blocks. `num_output` counts the output tokens in `tail` and the full blocks.
    tail: list[int] = field(default_factory=list)
    num_output: int = 0
    # None: it shares no KV.
    hasher: BlockHasher | None = None
    # Its blocks, when it has started.
    held: Held | None = None

    def leave_alone(self) -> None:
        """Lets no other request have what this one computes from here on."""
        self.block_hashes.clear()
        self.hasher = None


class PrefixCache:
    def __init__(self, memory: BlockManager, is_enabled: bool, rt_only: bool = False) -> None:
        """`rt_only`: best effort shares no KV."""
        self._memory = memory
        self._rt_only = rt_only
        self.is_enabled = is_enabled
        self._block_size = memory.span.block_size
        # The hashes of waiting prompts.
        self._waiting: dict[RequestKey, HashedPrefix] = {}
        # The era of the router's last ForgetAll.
        self._era = 0
        self._num_asked = self._num_found = 0

    def block_hashes(self, work: Work) -> Sequence[bytes]:
        """Returns the hashes of the prompt's first blocks, which it may share."""
        if not self._is_for(work) or (work.num_cached and self._num_passed(work.num_cached) is None):
            # The columns between what is here and what the pool has would be missing.
            return ()
        prefix = self._waiting[work.request.key] = self._hashed(work)
        return self._usable(work, prefix)

    def expect(self, work: Work) -> None:
        """Hashes the blocks of a request with KV elsewhere, before it is admitted."""
        if self._is_for(work):
            self._waiting[work.request.key] = self._hashed(work)

    def num_found(self, block_hashes: Sequence[bytes], num_cached: int = 0) -> int:
        """Returns the number of tokens with KV on the instance now. `num_cached`: those with KV in the pool."""
        return self._memory.num_known(block_hashes, self._num_passed(num_cached)) * self._block_size

    def _num_passed(self, num_cached: int) -> int | None:
        """Returns the number of columns of which a prompt needs no blocks in sliding groups. These are passed by its
        `num_cached` tokens with KV in the pool, and all blocks of the others are saved there. None: the instance passes
        columns itself, and does not save them."""
        span = self._memory.span
        return None if span.max_step else span.num_passed(num_cached)

    def take(self, work: Work, held: Held, max_blocks: int | None = None) -> int:
        """Has a starting prompt hold its shared blocks, at most `max_blocks`. Returns the number of tokens that they
        cover. `start` must follow before the next plan."""
        prefix = self._waiting.get(work.request.key)
        if prefix is None:
            return 0
        if usable := self._usable(work, prefix)[:max_blocks]:
            num_passed = self._num_passed(work.num_cached)
            prefix.num_shared = self._memory.share(held, usable, num_passed) * self._block_size
            # The blocks are published, or were until just now. Either way there is nothing left to publish.
            prefix.num_published = prefix.num_shared // self._block_size
        if _shares(work) and work.num_cached <= work.num_found:
            self._num_asked += len(work.request.prompt) + len(work.output)
            self._num_found += prefix.num_shared
        return prefix.num_shared

    def take_arriving(self, work: Work, held: Held) -> None:
        """Does the same for an admitted request with KV elsewhere. The KV of these blocks need not be copied."""
        prefix = self._waiting.get(work.request.key)
        if prefix is None:
            return
        if usable := self._usable_arriving(work, prefix):
            num_passed = self._memory.span.num_passed(work.num_cached)
            prefix.num_here = self._memory.share(held, usable, num_passed) * self._block_size
            prefix.num_published = prefix.num_here // self._block_size
        if work.is_first:
            self._num_asked += len(work.request.prompt)
            self._num_found += prefix.num_here

    def has_as_much(self, work: Work) -> bool:
        """Returns whether nothing that the pool has of a first request has to come from there, because it is here."""
        prefix = self._waiting.get(work.request.key)
        usable = self._usable(work, prefix) if prefix and work.is_first else ()
        return len(usable) > 0 and self._memory.num_known(usable) * self._block_size >= work.num_cached

    def missing(self, work: Work) -> Sequence[bytes]:
        """Returns the hashes of the full blocks with KV that a request with KV elsewhere has to get."""
        prefix = self._waiting.get(work.request.key)
        if prefix is None:
            return ()
        usable = self._usable_arriving(work, prefix)
        return usable[self._memory.num_known(usable, self._memory.span.num_passed(work.num_cached)) :]

    def num_held(self, work: Work) -> int:
        """Returns the number of blocks that the request would hold together with others if it began now."""
        prefix = self._waiting.get(work.request.key)
        if prefix is None:
            return 0
        if work.num_cached:
            num_passed = self._memory.span.num_passed(work.num_cached)
            return self._memory.num_held(self._usable_arriving(work, prefix), num_passed)
        return self._memory.num_held(self._usable(work, prefix))

    def start(self, work: Work, held: Held) -> HashedPrefix:
        """Removes the prompt from the waiting ones and returns its hashes."""
        waiting = self._waiting.pop(work.request.key, None)
        prefix = (waiting or self._hashed(work)) if held.layout.holds_kv else HashedPrefix([])
        prefix.held = held
        # A prompt that was preempted finds what it has computed itself.
        is_first = work.num_cached <= work.num_found
        prefix.num_found = max(prefix.num_shared, work.num_found) if is_first else work.num_found
        return prefix

    def forget(self, key: RequestKey) -> None:
        """Forgets a prompt that will not start soon."""
        self._waiting.pop(key, None)

    def forget_waiting(self) -> None:
        """Forgets all of them, and the router's era."""
        self._waiting.clear()
        self._era = 0

    def computed(self, request: Request, prefix: HashedPrefix) -> None:
        """Shares the blocks that were computed since the last call."""
        first, end = prefix.num_published, request.num_computed // self._block_size
        if prefix.held and prefix.block_hashes[first:end]:
            self._memory.publish(prefix.held, first, prefix.block_hashes[first:end])
            prefix.num_published = end

    def ended(self, request: Request, prefix: HashedPrefix) -> None:
        """Also publishes the output's full blocks, because the next turn of a chat begins with this answer."""
        if prefix.hasher is not None:
            num_more = request.num_computed - len(prefix.block_hashes) * self._block_size
            more = [*prefix.tail, *request.output[prefix.num_output :]][: max(num_more, 0)]
            prefix.block_hashes += prefix.hasher.block_hashes_of(more)
            self.computed(request, prefix)

    def forget_all(self, era: int) -> None:
        """Stops sharing all blocks, and those that requests of earlier eras will have."""
        self._era = era
        self.forget_blocks()
        for prefix in self._waiting.values():
            prefix.leave_alone()

    def forget_blocks(self) -> None:
        """Stops sharing all blocks from here on. Requests that share them already keep them."""
        self._memory.forget_all()

    def take_counts(self) -> tuple[int, int]:
        """Returns, for prompts that started since the last call, the number of tokens and of those with KV from the
        cache."""
        counts, self._num_asked, self._num_found = (self._num_asked, self._num_found), 0, 0
        return counts

    def _is_for(self, work: Work) -> bool:
        may_share = not work.is_alone and work.era >= self._era
        return self.is_enabled and may_share and (work.deadlines.is_rt or not self._rt_only)

    def _usable(self, work: Work, prefix: HashedPrefix) -> Sequence[bytes]:
        """Returns the hashes of the blocks that the request may share. The last token is always computed, for its
        logits."""
        num_tokens = len(work.request.prompt) + len(work.output)
        return prefix.block_hashes[: (num_tokens - 1) // self._block_size] if _shares(work) else ()

    def _usable_arriving(self, work: Work, prefix: HashedPrefix) -> Sequence[bytes]:
        """Returns the same for a request with KV elsewhere: no more than its full blocks there."""
        return self._usable(work, prefix)[: work.num_cached // self._block_size]

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
    """Whether the request may use KV of other requests."""
    return not work.request.needs_whole_prompt or bool(work.output)
