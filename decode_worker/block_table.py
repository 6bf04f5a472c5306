"""Which requests hold this instance's blocks and slots, and how many they will soon need. Pure.

The blocks themselves are in `instance/memory.py`. One that several requests share counts once.

An admitted request is in one state at a time:

    pulling (it has its blocks; its KV is being copied) -> running -> leaving (its KV is copied to the pool) -> gone
    a prompt without any KV is running at once

Abort removes a request in any state. Blocks under a copy are held until the copy is reported, even if the request was
aborted. A method that reports an outcome returns False or None if the request was aborted meanwhile. The request is
then gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from alignedserve.decode_worker.scheduled_request import ScheduledRequest, ScheduledRequests
from alignedserve.decode_worker.shared_ends import SharedEnds
from alignedserve.instance.memory import BlockManager
from alignedserve.instance.prefix_cache import PrefixCache
from alignedserve.kv.layout import PLAIN, REVERSED, Layout
from alignedserve.protocol.messages import InstanceLimits
from alignedserve.types import RequestKey


class BlockTable:
    def __init__(
        self, limits: InstanceLimits, memory: BlockManager, prefix_cache: PrefixCache, max_parts: int = 0
    ) -> None:
        """`max_parts`: see `SharedEnds`."""
        self._limits = limits
        self._memory = memory
        self._prefix_cache = prefix_cache
        self._span = memory.span
        # Whether each request has exactly one block per column.
        self._is_plain = not limits.window and self._span.num_groups == 1
        self.ends = SharedEnds(limits.block_size, max_parts, memory)
        needed = self._span.num_held(0, limits.max_model_len)
        if limits.num_blocks < needed:
            raise ValueError(
                f"num_blocks={limits.num_blocks}: a request of max_model_len={limits.max_model_len} needs {needed}"
            )
        self._pulling: ScheduledRequests = {}
        self._running: ScheduledRequests = {}
        self._leaving: ScheduledRequests = {}
        # Requests that will not run again and hold their blocks: aborted ones until their copy ends, and ended ones
        # until the pool has their KV.
        self._dying: ScheduledRequests = {}
        # Read-only views for other code.
        self.pulling: Mapping[RequestKey, ScheduledRequest] = self._pulling
        self.running: Mapping[RequestKey, ScheduledRequest] = self._running
        self.leaving: Mapping[RequestKey, ScheduledRequest] = self._leaving

    # ---- from state to state ----------------------------------------------------------------------------------------

    def admit(self, request: ScheduledRequest) -> None:
        self._lay_out(request)
        self._hold(request, request.layout.num_columns(request.num_tokens, self._limits.block_size))
        self._pulling[request.key] = request

    def start(self, request: ScheduledRequest) -> None:
        self._lay_out(request)
        num_columns = request.layout.num_columns(request.num_tokens, self._limits.block_size)
        num_passed = self._span.num_passed(request.num_cached)
        num_missing = self._memory.num_missing(request, num_columns, num_passed)
        self._hold(request, num_columns, num_lent=max(0, num_missing - self.num_free))
        self._running[request.key] = request

    def _lay_out(self, request: ScheduledRequest) -> None:
        if not self.ends.is_on or request.is_rt:
            return
        if request.layout is not PLAIN:
            raise RuntimeError(f"request {request.key}: its blocks are to be shared and {request.layout}")
        request.layout = REVERSED

    def pulled(self, key: RequestKey) -> ScheduledRequest | None:
        """Reports that the request's KV has arrived. Returns the request, which now runs; None if it was aborted
        meanwhile and is gone."""
        if self._bury(key):
            return None
        request = self._running[key] = self._pulling.pop(key)
        return request

    def pull_failed(self, key: RequestKey) -> None:
        if not self._bury(key):
            self._free(self._pulling.pop(key))

    def evict(self, key: RequestKey) -> bool:
        """Stops running the request. Its blocks are held until `evicted`. Returns False and changes nothing if it is
        not running. If blocks are shared from both ends, BE keeps only `num_cached` tokens and their blocks."""
        if key not in self._running:
            return False
        request = self._leaving[key] = self._running.pop(key)
        if self.ends.is_on and not request.is_rt:
            self._cut(request)
        return True

    def evicted(self, key: RequestKey) -> bool:
        """Reports that the request's KV is in the pool and the request is gone. Returns False if it was aborted
        meanwhile."""
        if self._bury(key):
            return False
        self._free(self._leaving.pop(key))
        return True

    def evict_failed(self, key: RequestKey) -> bool:
        """Returns True if the request runs again, False if it was aborted meanwhile and is gone."""
        if self._bury(key):
            return False
        self._running[key] = self._leaving.pop(key)
        return True

    def ended(self, key: RequestKey) -> None:
        self._free(self._running.pop(key))

    def hold(self, key: RequestKey) -> None:
        """Reports that the request has ended. It holds its blocks, and no slot, until `let_go`."""
        self._dying[key] = self._running.pop(key)

    def let_go(self, key: RequestKey) -> None:
        self._bury(key)

    def abort(self, key: RequestKey) -> bool:
        """Returns True if the request's blocks are held until a running copy is reported."""
        if key in self._running:
            self.ended(key)
            return False
        for requests in (self._pulling, self._leaving):
            if key in requests:
                self._dying[key] = requests.pop(key)
        return key in self._dying

    def _bury(self, key: RequestKey) -> bool:
        request = self._dying.pop(key, None)
        if request:
            self._free(request)
        return request is not None

    @property
    def computing(self) -> list[ScheduledRequest]:
        """The prompts that have begun and will still compute blocks that others may share."""
        begun = chain(self._running.values(), self._pulling.values())
        return [request for request in begun if request.block_hashes and request.num_pending > 1]

    # ---- blocks and slots -------------------------------------------------------------------------------------------

    def needed(self, request: ScheduledRequest, layout: Layout = PLAIN) -> int:
        """Returns the number of blocks that a request without any needs to begin."""
        num_columns = layout.num_columns(request.num_tokens, self._limits.block_size)
        num_blocks = self._span.num_blocks(self._span.num_passed(request.num_cached), num_columns)
        return num_blocks - self._num_held(request, layout)

    def _num_held(self, request: ScheduledRequest, layout: Layout) -> int:
        """Returns how many of the blocks with which the request would begin others hold already. Counts none if blocks
        are lent: a request without free blocks then shares fewer."""
        can_share = layout.holds_kv and not self.ends.is_on
        return self._prefix_cache.num_held(request.work) if can_share else 0

    def free_passed(self) -> None:
        """Frees the blocks that running requests have passed, and gives them the blocks that replace these: never more
        than were freed."""
        for request in self._running.values() if self._span.window else ():
            num_passed = self._span.num_passed(request.num_cached)
            if num_passed > request.num_passed:
                self._memory.free_passed(request, num_passed, request.num_tokens)

    def has_blocks(self, request: ScheduledRequest, num_tokens: int) -> bool:
        """Whether the request has blocks for the KV of its first `num_tokens` tokens."""
        return num_tokens <= request.end * request.layout.tokens_per_block(self._limits.block_size)

    def grow(self, request: ScheduledRequest, num_tokens: int) -> bool:
        """Gives the request blocks for the KV of its first `num_tokens` tokens, which the planned iteration writes.
        Returns False and changes nothing if too few are free or lendable."""
        num_columns = max(
            request.num_columns, request.layout.num_columns(num_tokens, self._limits.block_size)
        )
        if not (request.shares or self.ends.is_on):
            return self._memory.reserve(request, num_columns)
        count = self._memory.num_missing(request, num_columns)
        if request.shares and not request.is_rt:
            return self._complete(request, num_tokens, num_columns, count)
        if (num_lent := max(0, count - self.num_free)) > self.num_lendable_to(request):
            return False
        if request.shares and not self.ends.can_use(request, num_tokens, self._running):
            return False
        self._hold(request, num_columns, num_lent)
        if request.shares:
            self.ends.use(request, num_tokens)
        return True

    def _complete(self, lender: ScheduledRequest, num_tokens: int, num_columns: int, count: int) -> bool:
        renewed = self.ends.renewed(lender, num_tokens)
        if count + len(renewed) > self.num_free or not self.ends.can_complete(lender):
            return False
        self.ends.complete(lender, renewed)
        self._hold(lender, num_columns)
        return True

    @property
    def num_free(self) -> int:
        return self._memory.num_free

    @property
    def num_lendable(self) -> int:
        """The number of BE blocks that RT may share."""
        return self.ends.num_lendable(self._running.values())

    def num_lendable_to(self, request: ScheduledRequest) -> int:
        """Returns the number of blocks that the request may borrow. KV from the pool fills whole blocks, so a request
        with such KV borrows none until it has arrived."""
        is_borrower = request.is_rt and request.key not in self._pulling
        return self.num_lendable if is_borrower else 0

    @property
    def num_blocks_to_come(self) -> int:
        """The number of blocks that become free when the running copies end."""
        if not (self._leaving or self._dying):
            return 0
        return sum(self.num_freed(request) for request in (*self._leaving.values(), *self._dying.values()))

    @property
    def num_free_slots(self) -> int:
        return self._limits.max_num_seqs - len(self._running) - len(self._pulling) - len(self._leaving)

    @property
    def num_slots_to_come(self) -> int:
        return len(self._leaving)

    def _hold(self, request: ScheduledRequest, num_columns: int, num_lent: int = 0) -> None:
        """Gives the request the blocks that it needs for `num_columns` columns. The last `num_lent` are lent."""
        num_passed = self._span.num_passed(request.num_cached)
        if not self._memory.reserve(request, num_columns - num_lent, num_passed):
            count = self._memory.num_missing(request, num_columns - num_lent, num_passed)
            raise RuntimeError(
                f"request {request.key}: {count} blocks are planned, and {self.num_free} are free"
            )
        if num_lent:
            self.ends.lend(self._running.values(), request, num_lent)

    def num_freed(self, request: ScheduledRequest) -> int:
        """Returns the number of blocks that become free when the request leaves."""
        num_left = self.ends.num_not_freed(request) if request.shares else 0
        return request.num_blocks - num_left - self._memory.num_shared(request)

    def num_freed_together(self, requests: Sequence[ScheduledRequest]) -> int:
        """Returns the number of blocks that become free when all of these running requests leave. It is too high if the
        others share more blocks among themselves than the one with most."""
        num_blocks = sum(request.num_blocks for request in requests)
        if not num_blocks or not self._memory.num_repeated:
            return num_blocks
        leaving = {request.key for request in requests}
        others = [each for places in self._places for each in places.values() if each.key not in leaving]
        num_staying = sum(map(self.num_freed, others))
        num_staying += max((self._memory.num_shared(each) for each in others), default=0)
        return min(num_blocks, self._limits.num_blocks - self.num_free - num_staying)

    def _free(self, request: ScheduledRequest) -> None:
        if request.shares:
            self.ends.leave(request)
        self._memory.free(request)

    def _cut(self, lender: ScheduledRequest) -> None:
        """Reduces the lender to the tokens before the first one that is away, and to at least its first block, which is
        never lent. If the eviction fails, the lender runs again, and every running request holds a block."""
        lender.num_cached = self.ends.num_whole(lender)
        num_columns = max(1, lender.layout.num_columns(lender.num_cached, self._limits.block_size))
        self.ends.cut(lender, num_columns)
        self._memory.cut(lender, num_columns)

    # ---- what will be needed ----------------------------------------------------------------------------------------

    def growth_of(self, request: ScheduledRequest, num_iterations: int, layout: Layout | None = None) -> int:
        """Returns the number of additional blocks that the request needs for `num_iterations` iterations. A request
        that may be admitted holds none; `layout` is the one that it would have."""
        layout = layout or request.layout
        num_cached = min(request.num_tokens + num_iterations - 1, request.max_cached)
        num_columns = max(request.num_columns, layout.num_columns(num_cached, self._limits.block_size))
        num_passed = request.num_passed or self._span.num_passed(request.num_cached)
        num_more = self._span.num_blocks(num_passed, num_columns) - request.num_blocks
        if not request.num_columns:
            num_more -= self._num_held(request, layout)
        num_more = max(0, num_more)
        if request.shares and not request.is_rt:
            num_more += self.ends.num_renewed_at_most(request, num_cached)
        return num_more

    def growth(self, requests: Iterable[ScheduledRequest], num_iterations: int) -> int:
        """Returns the sum of `growth_of` over the requests. Avoids calling it for requests with one block per column,
        because every iteration needs this sum over all requests."""
        growth, num_more, block_size = 0, num_iterations - 1, self._limits.block_size
        for request in requests:
            if request.shares or not request.layout.holds_kv:
                growth += self.growth_of(request, num_iterations)
                continue
            num_cached = request.num_tokens + num_more
            if num_cached > request.max_cached:
                num_cached = request.max_cached
            missing = num_cached - request.num_columns * block_size
            if missing > 0:
                growth += (
                    -(-missing // block_size) if self._is_plain else self.growth_of(request, num_iterations)
                )
        return growth

    # ---- all requests -----------------------------------------------------------------------------------------------

    @property
    def _places(self) -> Sequence[ScheduledRequests]:
        return self._pulling, self._running, self._leaving, self._dying

    def __contains__(self, key: RequestKey) -> bool:
        return any(key in requests for requests in self._places)

    def __len__(self) -> int:
        return len(self._pulling) + len(self._running) + len(self._leaving) + len(self._dying)

    def __getitem__(self, key: RequestKey) -> ScheduledRequest:
        for requests in self._places:
            if key in requests:
                return requests[key]
        raise KeyError(key)

    def check(self) -> None:
        self.ends.check()
        held = [request for requests in self._places for request in requests.values()]
        self._memory.check_owners(held)
        num_held = sum(self.num_freed(each) + self._memory.num_shared(each) for each in held)
        num_held += self.ends.num_loans - self._memory.num_repeated
        if num_held + self.num_free != self._limits.num_blocks:
            raise RuntimeError(
                f"blocks leaked: {num_held} held + {self.num_free} free != {self._limits.num_blocks} in all"
            )
