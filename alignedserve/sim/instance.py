"""What simulated prefill and decode instances share: they act at iteration boundaries, by the real schedules.

Orders and finished copies that come while an iteration runs wait for its end, as they do in a real instance. Copies of
a kind go one after the other, as fast as the cost model's channels.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from alignedserve.messages import (
    AnyMessage,
    Failed,
    Gone,
    Hello,
    InstanceLimits,
    NewTokens,
    Request,
    UsePool,
    Welcome,
    Work,
)
from alignedserve.sim import model
from alignedserve.sim.process import SimProcess
from alignedserve.sim.segment import SimSegment, Write
from alignedserve.types import InstanceId, PoolBlockId, RequestKey

if TYPE_CHECKING:
    from alignedserve.cost import Channel
    from alignedserve.sim.world import World

Done = Callable[[bool], None]


@dataclass(slots=True)
class Sequence:
    request: Request
    output: list[int]
    # tokens whose KV is here, or will be once it is pulled
    num_cached: int
    # in the pool
    blocks: list[PoolBlockId]
    segment: SimSegment
    is_rt: bool

    @property
    def key(self) -> RequestKey:
        return self.request.key

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.output)


class Copies:
    """One after the other, urgent ones first."""

    def __init__(self, instance: SimInstance, channel: Channel) -> None:
        self._instance = instance
        self._channel = channel
        self._waiting: list[tuple[bool, int, float, Callable[[], None]]] = []
        self._num_started = 0
        self._is_busy = False

    def start(self, num_blocks: int, done: Callable[[], None], is_urgent: bool) -> None:
        seconds = self._channel.seconds(num_blocks * self._instance.block_bytes)
        self._num_started += 1
        heapq.heappush(self._waiting, (not is_urgent, self._num_started, seconds, done))
        self._go_on()

    def _go_on(self) -> None:
        if self._waiting and not self._is_busy:
            self._is_busy = True
            *_, seconds, done = heapq.heappop(self._waiting)
            self._instance.after(seconds, lambda: self._finish(done))

    def _finish(self, done: Callable[[], None]) -> None:
        self._is_busy = False
        done()
        self._go_on()


class Schedule(Protocol):
    limits: InstanceLimits

    def check(self) -> None: ...

    def check_idle(self) -> None: ...


class SimInstance(SimProcess):
    schedule: Schedule

    def __init__(self, world: World, instance_id: InstanceId, limits: InstanceLimits) -> None:
        super().__init__(world, instance_id)
        self.limits = limits
        self.block_bytes = limits.block_size * world.cost.kv_bytes_per_token

    def begin(self) -> None:
        self.sequences: dict[RequestKey, Sequence] = {}
        # under a copy when they were aborted
        self.aborted: set[RequestKey] = set()
        self.segment: SimSegment | None = None
        self._writes: set[Write] = set()
        self._todo: list[Callable[[], None]] = []
        self._is_computing = False
        self._is_awake = False

    def hello(self) -> Hello:
        return replace(self.make_hello(self.schedule.limits), cost=self.world.cost)

    def end_life(self) -> None:
        super().end_life()
        for write in self._writes:
            write.abandon()

    def check(self) -> None:
        """Holds at any time."""
        self.schedule.check()

    def check_idle(self) -> None:
        """Nothing is left of any request."""
        self.schedule.check_idle()
        left = [*self.sequences, *self.aborted]
        if left:
            raise RuntimeError(f"idle, but {self.instance_id} holds requests {left}")

    # ---- iteration boundaries ----

    def received(self, message: AnyMessage) -> None:
        self.at_boundary(lambda: self._take(message))

    def at_boundary(self, action: Callable[[], None]) -> None:
        self._todo.append(action)
        if not self._is_computing and not self._is_awake:
            self._is_awake = True
            self.after(0.0, self._boundary)

    def _boundary(self) -> None:
        self._is_awake = False
        todo, self._todo = self._todo, []
        for action in todo:
            action()
        self.go_on()

    def compute(self, duration_s: float, done: Callable[[], None]) -> None:
        def finish() -> None:
            self._is_computing = False
            done()
            self._boundary()

        self._is_computing = True
        self.after(duration_s, finish)

    def _take(self, message: AnyMessage) -> None:
        if isinstance(message, UsePool):
            self.segment = self.world.segments[message.segment]
        elif not isinstance(message, Welcome):
            self.obey(message)

    def obey(self, order: AnyMessage) -> None:
        raise NotImplementedError

    def go_on(self) -> None:
        """Plan, report, start the next iteration if there is something to compute."""
        raise NotImplementedError

    # ---- requests ----

    def adopt(self, work: Work) -> None:
        key = work.request.key
        if self.segment is None:
            raise RuntimeError(f"{self.instance_id} gets request {key}, but no pool to use")
        self.sequences[key] = Sequence(
            work.request,
            list(work.output),
            work.num_cached,
            work.blocks,
            self.segment,
            work.deadlines.is_rt,
        )

    def forget(self, key: RequestKey) -> None:
        """It was aborted, and nothing of it is under a copy any more."""
        self.sequences.pop(key, None)
        self.aborted.discard(key)
        self.send(Gone([key]))

    def fail(self, key: RequestKey, what: str) -> None:
        """Or forget, if it was aborted meanwhile."""
        if key in self.aborted:
            self.forget(key)
        else:
            del self.sequences[key]
            self.send(Failed(key, what, "the simulation wanted it so"))

    def advance(self, sequence: Sequence, count: int) -> None:
        """The KV of so many tokens more was computed."""
        sequence.num_cached += count
        self.world.computed[sequence.key] += count

    def sample(self, sequence: Sequence) -> NewTokens:
        k, request = len(sequence.output), sequence.request
        token = model.sample(request.seed, k)
        sequence.output.append(token)
        reason = model.finish_reason(request, k + 1, self.limits.max_model_len)
        return NewTokens(request.key, first=k, tokens=[token], finish_reason=reason)

    # ---- copies: `done` is called at a boundary, with whether it worked ----

    def load(self, copies: Copies, sequence: Sequence, done: Done) -> None:
        """Its cached KV from the pool."""
        segment, key, num_tokens = sequence.segment, sequence.key, sequence.num_cached
        blocks, works = list(sequence.blocks), self.world.copy_works()

        def finish() -> None:
            segment.check_read(key, blocks, num_tokens)
            self.at_boundary(lambda: done(works))

        segment.check_read(key, blocks, num_tokens)
        copies.start(segment.num_blocks_for(num_tokens), finish, sequence.is_rt)

    def save(self, copies: Copies, sequence: Sequence, first: int, end: int, done: Done) -> None:
        """KV of its tokens from `first` up to `end` to the pool."""
        works = self.world.copy_works()
        write = sequence.segment.write(sequence.key, sequence.blocks, first, end)
        self._writes.add(write)

        def finish() -> None:
            self._writes.remove(write)
            if works:
                write.finish(end)
            else:
                write.abandon()
            self.at_boundary(lambda: done(works))

        copies.start(write.num_blocks, finish, sequence.is_rt)
