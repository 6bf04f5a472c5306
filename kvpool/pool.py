"""The pool's decisions: it takes the router's messages and returns the answers. It does no I/O, has no clock, and never
touches the blocks' bytes. `PoolShell`, at the end, gives it a clock and a connection.

One block of the pool is a whole column of a request (`kv/span.py`), for which instances have one block per
layer group.

A pool is built on an owner table, the segment's or a plain one, and begins with its content. `inventory` is called for
every Hello, because a new router commits candidates again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from alignedserve.kv.span import KvSpan
from alignedserve.kvpool.batch_builder import BatchLimits, TailOf
from alignedserve.kvpool.block_allocator import BlockAllocator
from alignedserve.kvpool.next_turns import NextTurns
from alignedserve.kvpool.owners import Allocation, OwnerTable
from alignedserve.kvpool.prefix_groups import GroupedBatch, PrefixGroups
from alignedserve.kvpool.promises import PromiseLimits
from alignedserve.kvpool.quadtree import QuadTree
from alignedserve.kvpool.search import find_near, form_batch
from alignedserve.protocol.messages import (
    MAX_PROMISED_SHARE,
    AnyMessage,
    Candidates,
    Commit,
    FindNear,
    ForgetAll,
    FormBatch,
    InstanceLimits,
    MakeSpare,
    Message,
    PoolUse,
    Release,
    Reserve,
    Reserved,
    Stored,
    Welcome,
)
from alignedserve.types import RequestKey


@dataclass(frozen=True)
class PoolConfig:
    # Seconds without a router after which a reservation lapses. A connected router ends each reservation itself,
    # however long a prompt waits and computes, and knows how long its blocks may be written.
    lapse_s: float = 300.0
    # Seconds of the horizon. The search for the next batch starts at a request that is due within it.
    horizon_s: float = 0.5
    # The blocks that a candidate takes on a decode instance, where it computes a token at a time. None: as many as it
    # has here.
    span: KvSpan | None = None
    # The share of all blocks that is promised at most to the next turns of one API key's chats.
    promised_share: float = 0.25

    def limits(self, num_blocks: int, block_size: int) -> InstanceLimits:
        """Returns what the router is told of a pool with this many blocks. It reads from that for how many tokens saved
        KV is of use."""
        span = self.span or KvSpan(block_size)
        return InstanceLimits(
            num_blocks,
            block_size,
            window=span.window,
            tile_tokens=span.tile_tokens,
            has_state=span.has_state,
            saves_whole=True,
        )


class Pool:
    def __init__(
        self, table: OwnerTable, block_size: int, now: float, config: PoolConfig | None = None
    ) -> None:
        self._config = config or PoolConfig()
        share = self._config.promised_share
        limits = PromiseLimits(int(share * table.size), int(MAX_PROMISED_SHARE * table.size))
        span = self._config.span or KvSpan(block_size)
        self._allocator = BlockAllocator(table, block_size, now + self._config.lapse_s, limits, span)
        self._next_turns = NextTurns(self._allocator, block_size)
        self._tree = QuadTree(span)
        self._groups = PrefixGroups(self._allocator.tail_of)

    def on(self, message: Message, now: float) -> list[Message]:
        match message:
            case Reserve():
                return self._reserve(message, now)
            case Commit():
                return self._commit(message, now)
            case MakeSpare(keys=keys):
                for key in keys:
                    self._no_candidate(key)
                    self._allocator.make_spare(key)
                return []
            case Release(keys=keys):
                for key in keys:
                    self._no_candidate(key)
                    self._groups.discard(key)
                    self._allocator.release(key)
                    self._next_turns.released(key)
                return []
            case ForgetAll():
                self._allocator.forget_all()
                return []
            case FormBatch():
                return [self._form_batch(message, now)]
            case FindNear():
                return [self._find_near(message)]
            case _:
                raise ValueError(f"a {type(message).__name__} is not for the pool")

    def tick(self, now: float, has_router: bool = False) -> list[Message]:
        """Ends promises, and lets reservations lapse if no router is connected. Call it every quarter of a second."""
        self._next_turns.expire(now)
        if has_router:
            self._allocator.renew(now + self._config.lapse_s)
            return []
        lapsed = self._allocator.lapse(now)
        for key in lapsed:
            self._next_turns.released(key)
        return [gone(key) for key in lapsed]

    def inventory(self) -> list[Stored]:
        """Lists the pool's content, including reservations, and empties the tree: nothing is a candidate until it is
        committed again."""
        self._tree = QuadTree(self._tree.span)
        self._groups = PrefixGroups(self._allocator.tail_of)
        return [
            Stored(each.key, list(each.blocks), each.num_tokens, each.is_new)
            for each in self._allocator.allocations
        ]

    @property
    def knows_content(self) -> bool:
        return self._allocator.knows_content

    @property
    def num_blocks(self) -> int:
        return self._allocator.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._allocator.num_free_blocks

    @property
    def num_spare_blocks(self) -> int:
        """The number of blocks that are freed when they are needed."""
        return self._allocator.num_spare_blocks

    @property
    def use(self) -> PoolUse:
        allocator = self._allocator
        return PoolUse(
            allocator.num_free_blocks,
            allocator.num_spare_blocks,
            allocator.num_kept_blocks,
            allocator.num_shared_blocks,
            allocator.num_promised_blocks,
            self._next_turns.outcomes,
        )

    @property
    def is_empty(self) -> bool:
        """Whether no request has blocks."""
        return not len(self._allocator)

    @property
    def allocations(self) -> Iterable[Allocation]:
        """The blocks of each request."""
        return self._allocator.allocations

    @property
    def num_candidates(self) -> int:
        return len(self._tree)

    def check(self) -> None:
        """Raises if the pool's counts are inconsistent."""
        self._allocator.check()
        self._tree.check()
        self._groups.check(self._tree)

    def check_idle(self) -> None:
        """Raises as `check` does, and if a request has blocks or is a candidate."""
        self.check()
        self._allocator.check_idle()
        if num_left := len(self._tree):
            raise RuntimeError(f"idle, but {num_left} requests are candidates")

    def _reserve(self, reserve: Reserve, now: float) -> list[Message]:
        deadline_s = now + self._config.lapse_s
        wanted = reserve.key, reserve.num_tokens, deadline_s, reserve.hashes
        grant = (
            self._allocator.find(*wanted, reserve.owner)
            if reserve.finds_only
            else self._allocator.reserve(*wanted, reserve.is_optional, reserve.owner)
        )
        self._next_turns.reserved(reserve, grant and grant.num_found, now)
        if grant is None:
            return [Reserved(reserve.key, None, number=reserve.number)]
        self._no_candidate(reserve.key)
        self._groups.discard(reserve.key)
        return [
            Reserved(
                reserve.key, grant.blocks, grant.dropped, reserve.number, grant.num_tokens, grant.num_found
            )
        ]

    def _commit(self, commit: Commit, now: float) -> list[Message]:
        self._no_candidate(commit.key)
        self._groups.discard(commit.key)
        if not self._allocator.commit(commit.key, commit.num_tokens, commit.first_whole):
            self._allocator.release(commit.key)
            self._next_turns.released(commit.key)
            return [gone(commit.key)]
        self._next_turns.committed(commit.key)
        if commit.is_candidate:
            self._tree.insert(commit.key, commit.num_tokens, commit.due_s, now)
            self._groups.add(commit.key, commit.prefix_group)
        return []

    def _form_batch(self, ask: FormBatch, now: float) -> Candidates:
        limits = BatchLimits(ask.max_blocks, ask.max_requests, ask.min_requests)
        urgent_before_s = now + self._config.horizon_s
        keys = form_batch(
            self._tree,
            limits,
            urgent_before_s=urgent_before_s,
            starved_before_s=now - ask.starvation_s,
            tail_of=self._tail_of,
        )
        if len(self._groups):
            most = max(len(keys), min(ask.max_requests, ask.fair_share))
            batch = GroupedBatch(self._tree, self._groups, BatchLimits(ask.max_blocks, most))
            batch.take(keys, urgent_before_s)
            keys = batch.keys
        self._tree.take_batch(keys, now)
        self._groups.give(keys, ask.decode)
        return Candidates(ask.decode, keys, is_batch=True, replaces=ask.replaces)

    def _find_near(self, ask: FindNear) -> Candidates:
        limits = BatchLimits(ask.max_blocks, ask.max_requests)
        keys = find_near(self._tree, ask.low, ask.high, limits, self._tail_of)
        if len(self._groups):
            batch = GroupedBatch(self._tree, self._groups, limits)
            batch.join(self._groups.beside(ask.decode))
            batch.take(keys)
            keys = batch.keys
        for key in keys:
            self._tree.remove(key)
        self._groups.give(keys, ask.decode)
        return Candidates(ask.decode, keys, is_batch=False, batch=ask.batch)

    @property
    def _tail_of(self) -> TailOf | None:
        """None: blocks that candidates have in common count for each of them. `GroupedBatch` counts them once."""
        have_common = self._allocator.num_shared_blocks and not self._tree.span.window
        return self._allocator.tail_of if have_common and not len(self._groups) else None

    def _no_candidate(self, key: RequestKey) -> None:
        if key in self._tree:
            self._tree.remove(key)
            self._groups.discard(key)


def gone(key: RequestKey) -> Reserved:
    """Returns the unsolicited message that nothing of a request is in the pool any more."""
    return Reserved(key, None, dropped=[key])


# ---- its shell -------------------------------------------------------------------------------------------------------


# Seconds between checks of the reservations. Changes in the pool's use are then sent to the router.
TICK_S = 0.25


class PoolShell:
    """The pool between its connection and its ticks, live and in virtual time."""

    def __init__(
        self,
        pool: Pool,
        send: Callable[[Message], None],
        has_router: Callable[[], bool],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._pool = pool
        self._send = send
        self._has_router = has_router
        self._clock = clock or time.monotonic
        # The use that the router knows.
        self._told = PoolUse(-1, -1)

    def on_up(self, welcome: Welcome) -> None:
        self._told = PoolUse(-1, -1)

    def on_down(self) -> None:
        """Does nothing: the pool keeps what it holds for the next router."""

    def on_message(self, message: AnyMessage) -> None:
        self._answer(self._pool.on(message, self._clock()))

    def tick(self) -> None:
        self._answer(self._pool.tick(self._clock(), self._has_router()))
        use = self._pool.use
        if use != self._told:
            self._told = use
            self._send(use)
            if self._pool.is_empty:
                self._pool.check_idle()

    def _answer(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._send(message)
