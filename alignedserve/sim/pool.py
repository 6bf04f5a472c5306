"""The pool's process in virtual time. Its segment outlives it, unless `lose_segment` is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec

from alignedserve.kvpool.pool import Pool, PoolConfig
from alignedserve.kvpool.shell import TICK_S, PoolShell
from alignedserve.protocol.kv_span import KvSpan
from alignedserve.protocol.messages import AnyMessage, Hello, InstanceLimits, Message, PoolUse, Welcome
from alignedserve.sim.process import SimProcess
from alignedserve.sim.segment import SimSegment
from alignedserve.types import InstanceId

if TYPE_CHECKING:
    from alignedserve.sim.world import World


class PoolProcess(SimProcess):
    role = "kvpool"

    def __init__(
        self,
        world: World,
        instance_id: InstanceId,
        limits: InstanceLimits,
        span: KvSpan,
    ) -> None:
        """`limits`: counts whole columns. `span`: the blocks of a request at a decode instance."""
        super().__init__(world, instance_id)
        self._limits = limits
        self._span = span
        self._num_segments = 0
        self.segment = self._new_segment()

    def lose_segment(self) -> None:
        """Loses the memory together with the process."""
        if self.is_up:
            raise RuntimeError(f"{self.instance_id} is up with epoch {self.epoch}, its segment can't be lost")
        self.segment = self._new_segment()

    def _new_segment(self) -> SimSegment:
        self._num_segments += 1
        segment = SimSegment(
            f"segment-{self._num_segments}",
            self._limits.num_blocks,
            self._limits.block_size,
            self._span.num_groups,
        )
        self.world.segments[segment.name] = segment
        return segment

    def maps(self, segment: str) -> bool:
        return self.segment.name == segment

    def start(self) -> None:
        config = PoolConfig(span=self._span if self._span.window else None)
        clock = self.local_clock.now
        self.core = Pool(self.segment.owners, self._limits.block_size, clock(), config)
        self._shell = PoolShell(self.core, self._tell, lambda: self._connection is not None, clock)
        super().start()

    def begin(self) -> None:
        """Starts the ticks. The core outlives the router: the next router starts with what is in the pool."""
        self.after(TICK_S, self._tick)

    def _tick(self) -> None:
        self._shell.tick()
        self.after(TICK_S, self._tick)

    def hello(self) -> Hello:
        return msgspec.structs.replace(
            self.make_hello(self._limits), segment=self.segment.name, inventory=self.core.inventory()
        )

    def received(self, message: AnyMessage) -> None:
        if isinstance(message, Welcome):
            self._shell.on_up(message)
        else:
            self._shell.on_message(message)

    def _tell(self, message: Message) -> None:
        # The simulator's router has no status page.
        if not isinstance(message, PoolUse):
            self.send(cast(AnyMessage, message))
