"""Copies in virtual time: see `instance.executor.Transfers`.

As in live instances, loads run one after the other, and so do saves, and pulls from the same prefill instance. Urgent
ones go first. Each copy is as fast as the cost model's channel and the links that it shares with others allow. KV that
is staged for other instances is in a real `StagingBuffer`.

A copy moves the recorded contents of blocks. It is an error to copy anything but the request's own KV from the pool.
Loads check the share `World.check_share` of the blocks, as with `--verify-blocks`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from alignedserve.sim.carrier import Carrier
from alignedserve.sim.clock import Clock
from alignedserve.sim.executor import SimEngine
from alignedserve.sim.faults import NoFaults
from alignedserve.sim.host_links import Crossings, Ports
from alignedserve.sim.links import Flow
from alignedserve.sim.process import SimProcess
from alignedserve.sim.segment import Content, SimSegment
from alignedserve.timing.cost import CopyChannel
from alignedserve.transport.completions import Completions, Done, Outcome, TransferId, TransferIds
from alignedserve.transport.runs import HAS_BLOCK, Pairs, TransferSpec, wanted
from alignedserve.transport.staging_buffer import NotStaged, StagingBuffer
from alignedserve.types import BlockId, InstanceId, PoolBlockId, RequestKey

# The error of a copy that the world's faults let fail.
FAILS_SO = "the simulation has it so"

WhenAwake = Callable[[Callable[[], None]], None]


class CopyWorld(Protocol):
    """The part of the world that copies use."""

    clock: Clock
    carrier: Carrier
    faults: NoFaults
    check_share: float
    processes: dict[InstanceId, SimProcess]
    transfers: dict[InstanceId, SimTransfers]


def _without_flaws(contents: Sequence[Content]) -> list[Content]:
    return [each._replace(flaw=0) for each in contents]


def _at_once(action: Callable[[], None]) -> None:
    action()


@dataclass(frozen=True)
class SimChannels:
    """The channels of one instance's copies."""

    load: CopyChannel
    save: CopyChannel
    pull: CopyChannel
    # The links that the instance's copies cross.
    ports: Ports
    # The share of a prefill instance's blocks that is reserved for KV that decode instances pull.
    staging_share: float = 0.0


@dataclass(frozen=True)
class CopySteps:
    # Begins the copy, or returns why that is impossible.
    begin: Callable[[], str | None]
    # Ends the copy. Called with the error that stopped the copy, or with None when every byte has arrived. Returns the
    # error to report.
    end: Callable[[str | None], str | None]
    done: Done


@dataclass(eq=False)
class Copy:
    transfer: TransferId
    what: str
    keys: tuple[RequestKey, ...]
    num_bytes: int
    channel: CopyChannel
    crossings: Crossings
    steps: CopySteps
    # The share of its bytes after which the copy fails; None: it succeeds.
    share: float | None
    has_begun: bool = False
    # See Outcome.
    is_denied: bool = False
    wrong_block: PoolBlockId | None = None
    num_changed: int = 0
    # When its lane was free for the copy, in seconds; None: not yet.
    begun_s: float | None = None
    is_over: bool = False


class Lane:
    """Copies of one kind, one after the other, urgent ones first."""

    def __init__(self, world: CopyWorld, completions: Completions, when_awake: WhenAwake) -> None:
        """`when_awake` calls its argument when all processes that take part in these copies are awake."""
        self._world = world
        self._clock = world.clock
        self._carrier = world.carrier
        self._completions = completions
        self._when_awake = when_awake
        self._waiting: list[tuple[bool, int, Copy]] = []
        self._num_started = 0
        self._current: Copy | None = None
        self._flow: Flow | None = None

    @property
    def copies(self) -> list[Copy]:
        """All copies that are not over."""
        waiting = [copy for *_, copy in self._waiting if not copy.is_over]
        return waiting + ([self._current] if self._current else [])

    def start(self, copy: Copy, is_urgent: bool) -> None:
        self._num_started += 1
        heapq.heappush(self._waiting, (not is_urgent, self._num_started, copy))
        self._go_on()

    def stop(self, copy: Copy, error: str) -> None:
        """Safe to repeat."""
        if copy.is_over:
            return
        if copy is self._current:
            if self._flow:
                self._carrier.stop(self._flow)
            self._current = self._flow = None
        self._finish(copy, error)
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self._current is None:
            *_, copy = heapq.heappop(self._waiting)
            if copy.is_over:
                continue
            error = FAILS_SO if copy.share == 0.0 else copy.steps.begin()
            copy.has_begun = copy.has_begun or error is None
            if error is not None:
                self._finish(copy, error)
                continue
            self._current, copy.begun_s = copy, self._clock.now
            num_bytes = copy.num_bytes * (1.0 if copy.share is None else copy.share)
            num_bytes *= self._world.faults.copy_slowdown(copy.what)
            arrived = partial(self._arrived, copy)
            self._flow = self._carrier.start(int(num_bytes), copy.channel, copy.crossings, arrived)

    def _arrived(self, copy: Copy) -> None:
        self._flow = None
        self._when_awake(partial(self._end, copy))

    def _end(self, copy: Copy) -> None:
        """Ends the copy, unless it was stopped while a process that takes part in it hung."""
        if copy is self._current:
            self._current = None
            self._finish(copy, None if copy.share is None else FAILS_SO)
            self._go_on()

    def _finish(self, copy: Copy, error: str | None) -> None:
        copy.is_over = True
        if copy.has_begun:
            error = copy.steps.end(error)
        seconds = self._clock.now - copy.begun_s if copy.begun_s is not None else 0.0
        outcome = Outcome(copy.transfer, copy.what, copy.keys, error, copy.num_bytes, seconds, copy.is_denied)
        if copy.wrong_block is not None:
            outcome = replace(
                outcome, wrong_block=copy.wrong_block, num_checked=1, num_changed=copy.num_changed
            )
        self._completions.post(copy.steps.done, outcome)


class SimTransfers:
    def __init__(
        self,
        world: CopyWorld,
        ids: TransferIds,
        engine: SimEngine,
        channels: SimChannels,
        wake: Callable[[], object],
        when_awake: WhenAwake = _at_once,
    ) -> None:
        self.completions = Completions(wake)
        self.staging_share = channels.staging_share
        self.checks_some_blocks = 0 < world.check_share < 1
        self.staging_buffer = StagingBuffer(ids.epoch, self.completions)
        self.engine = engine
        self._world = world
        self._ids = ids
        self._channels = channels
        self._segment: SimSegment | None = None
        self._when_awake = when_awake
        self._loads, self._saves = (Lane(world, self.completions, when_awake) for _ in range(2))
        # A decode instance has one connection to each prefill instance, and these pull side by side.
        self._pulls: dict[InstanceId, Lane] = {}
        # For each pull of staged KV by another instance, the lane that can stop the pull.
        self._pulled_by_others: dict[Copy, Lane] = {}
        self._is_dead = False

    # ---- from and to the pool ---------------------------------------------------------------------------------------

    def use_pool(self, pool: SimSegment, checksums: object = None) -> None:
        self._segment = pool

    def leave_pool(self) -> None:
        self._segment = None

    def maps(self, segment: str) -> bool:
        return self._segment is not None and self._segment.name == segment

    def load(self, key: RequestKey, pairs: Pairs, done: Done, is_urgent: bool = False) -> None:
        segment = self._pool(key)

        def read() -> list[Content]:
            return self._in_pool(segment, key, [there for _, there in pairs])

        found: list[Content] = []

        def begin() -> str | None:
            found.extend(read())
            return None

        def end(error: str | None) -> str | None:
            if error is not None:
                return error
            not_found_yet = segment.changed - segment.marked
            new = {there for _, there in pairs if there in not_found_yet and self._is_checked(there, copy)}
            segment.marked |= new
            copy.num_changed = len(new)
            if wrong := [there for _, there in pairs if there in segment.marked]:
                copy.wrong_block = PoolBlockId(wrong[0] // segment.num_groups)
                return f"pool block {copy.wrong_block} is not as it was saved"
            # A bit may have flipped meanwhile.
            now = read()
            if now != found and _without_flaws(now) != _without_flaws(found):
                raise RuntimeError(f"request {key}: its blocks were written while they were read")
            self._hold([here for here, _ in pairs], now)
            return None

        channel, crossings = self._channels.load, self._channels.ports.from_pool
        copy = self._copy("load", [key], len(pairs), channel, crossings, CopySteps(begin, end, done))
        self._loads.start(copy, is_urgent)

    def save(
        self, key: RequestKey, pairs: Pairs, num_empty: int, done: Done, is_urgent: bool = False
    ) -> None:
        segment = self._pool(key)
        # The blocks are copied as they were when the copy was started, whatever is computed meanwhile.
        write = segment.write(self._to_save(key, pairs, num_empty))

        def end(error: str | None) -> str | None:
            if error is None:
                write.finish()
            else:
                write.abandon()
            return error

        channel, crossings = self._channels.save, self._channels.ports.to_pool
        steps = CopySteps(lambda: None, end, done)
        copy = self._copy("save", [key], len(pairs), channel, crossings, steps)
        # The copy holds its pool blocks from here on, even while it waits.
        copy.has_begun = True
        self._saves.start(copy, is_urgent)

    def _is_checked(self, block: PoolBlockId, copy: Copy) -> bool:
        return hash((block, copy.transfer.number)) % 1000 < 1000 * self._world.check_share

    def _in_pool(self, segment: SimSegment, key: RequestKey, blocks: Sequence[PoolBlockId]) -> list[Content]:
        return segment.read(key, blocks)

    def _to_save(self, key: RequestKey, pairs: Pairs, num_empty: int) -> list[tuple[PoolBlockId, Content]]:
        places = [(there, self.own(key, here, "saved")) for here, there in pairs]
        self._check_filled(key, [held for _, held in places], num_empty)
        return places

    def _hold(self, blocks: Sequence[BlockId], contents: Sequence[Content]) -> None:
        """Stores the copied contents in these blocks."""
        for block, content in zip(blocks, contents, strict=True):
            self.engine.contents[block] = content

    def _check_filled(self, key: RequestKey, saved: Sequence[Content], num_empty: int) -> None:
        """Raises RuntimeError unless all blocks are full, except those of the last column, which have `num_empty` empty
        slots."""
        first_of_last = len(saved) - self.engine.span.num_groups
        for index, held in enumerate(saved):
            wanted = self.engine.format.block_size - (num_empty if index >= first_of_last else 0)
            if held.num_tokens != wanted:
                raise RuntimeError(
                    f"request {key}: {wanted} tokens of a block are to be saved, which holds {held}"
                )

    def own(self, key: RequestKey, block: BlockId, how: str) -> Content:
        """Returns the block's content as the request's own: shared KV becomes its own in the pool and at another
        instance. `how`: what is done with it, for errors."""
        held = self.engine.contents.get(key, block)
        if held is None:
            raise RuntimeError(f"request {key}: block {block} is to be {how}, and holds nothing")
        return held._replace(key=key)

    def abandon(self, key: RequestKey) -> None:
        for lane in (self._loads, self._saves):
            for copy in lane.copies:
                if key in copy.keys:
                    lane.stop(copy, "abandoned")

    def _pool(self, key: RequestKey) -> SimSegment:
        if self._segment is None:
            raise RuntimeError(f"request {key} is to be copied, but there is no pool to use")
        return self._segment

    # ---- between instances ------------------------------------------------------------------------------------------

    def stage(self, key: RequestKey, blocks: Sequence[BlockId], done: Done) -> None:
        self.staging_buffer.put(key, blocks, done)

    def unstage(self, key: RequestKey) -> None:
        self.staging_buffer.withdraw(key)

    def pull(self, source: InstanceId, address: str, specs: Sequence[TransferSpec], done: Done) -> None:
        keys = [key for key, _ in specs]
        here = [block for _, blocks in specs for block in blocks]
        owners = [key for key, blocks in specs for block in blocks if block != HAS_BLOCK]
        sender, theirs = self._world.transfers.get(source), list[BlockId]()
        lane = self._pulls.setdefault(
            source, Lane(self._world, self.completions, partial(self._when_both_awake, source))
        )

        found: list[Content] = []

        def begin() -> str | None:
            if sender is None or self._world.transfers.get(source) is not sender:
                return f"{source} is gone"
            try:
                staged = sender.staging_buffer.begin_pull(keys, [len(blocks) for _, blocks in specs])
            except NotStaged as error:
                copy.is_denied = True
                return str(error)
            theirs.extend(there for at, there in zip(here, staged, strict=True) if at != HAS_BLOCK)
            found.extend(sender.to_pull(owners, theirs))
            sender._pulled_by_others[copy] = lane
            return None

        def end(error: str | None) -> str | None:
            assert sender
            del sender._pulled_by_others[copy]
            if sender._is_dead:
                return error or f"{source} is gone"
            if error is not None:
                sender.staging_buffer.cancel_pull(keys)
                return error
            if sender.to_pull(owners, theirs) != found:
                raise RuntimeError(f"requests {keys}: {source}'s blocks were written while they were pulled")
            self._hold(wanted(specs), found)
            sender.staging_buffer.finish_pull(keys)
            return None

        crossings = self._channels.ports.nvlink_in + (sender._channels.ports.nvlink_out if sender else ())
        steps = CopySteps(begin, end, done)
        copy = self._copy("pull", keys, len(owners), self._channels.pull, crossings, steps)
        lane.start(copy, is_urgent=False)

    def to_pull(self, owners: Sequence[RequestKey], blocks: Sequence[BlockId]) -> list[Content]:
        return [self.own(key, block, "pulled") for key, block in zip(owners, blocks, strict=True)]

    def _when_both_awake(self, source: InstanceId, action: Callable[[], None]) -> None:
        """Waits for both ends, because both take part in a pull."""
        sender = self._world.processes[source]
        self._when_awake(lambda: sender.when_awake(action))

    def cut(self) -> None:
        for lane in self._pulls.values():
            for copy in lane.copies:
                lane.stop(copy, "closed")
        for copy, lane in list(self._pulled_by_others.items()):
            lane.stop(copy, "cut by the other end")

    def close(self) -> None:
        self.cut()

    def die(self) -> None:
        """Ends all copies of a killed instance: it writes nothing any more, and nothing can be pulled from it."""
        self._is_dead = True
        for lane in (self._loads, self._saves):
            for copy in lane.copies:
                lane.stop(copy, "dead")
        self.cut()

    def _copy(
        self,
        what: str,
        keys: Sequence[RequestKey],
        num_blocks: int,
        channel: CopyChannel,
        crossings: Crossings,
        steps: CopySteps,
    ) -> Copy:
        form = self.engine.format
        num_bytes = num_blocks * (form.block_bytes if what == "pull" else form.pool_block_bytes)
        share = self._world.faults.copy_share(what, keys[0])
        return Copy(self._ids.next(), what, tuple(keys), num_bytes, channel, crossings, steps, share)
