"""The pool's process in virtual time. Its segment outlives it, unless `lose_segment` is called."""

from __future__ import annotations

import msgspec

from alignedserve.kv.span import KvSpan
from alignedserve.kvpool.pool import TICK_S, Pool, PoolConfig, PoolShell
from alignedserve.protocol.messages import Hello, InstanceLimits
from alignedserve.sim.process import SimProcess
from alignedserve.sim.segment import SimSegment
from alignedserve.sim.world import World
from alignedserve.types import InstanceId


class SimPool(SimProcess):
    role = "kvpool"
    world: World

    def __init__(
        self, world: World, instance_id: InstanceId, limits: InstanceLimits, config: PoolConfig
    ) -> None:
        """`limits`: counts whole columns."""
        super().__init__(world, instance_id)
        self._limits = limits
        self._config = config
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
            self._config.span or KvSpan(self._limits.block_size),
        )
        self.world.segments[segment.name] = segment
        return segment

    def maps(self, segment: str) -> bool:
        return self.segment.name == segment

    def start(self) -> None:
        super().start()
        self._link.repeat(TICK_S, self._shell.tick)

    def begin(self) -> PoolShell:
        """The core outlives the router: the next router starts with what is in the pool."""
        self.core = Pool(self.segment.owners, self._limits.block_size, self.now(), self._config)
        self._shell = PoolShell(self.core, self.send, lambda: self._link.is_up, self.now)
        return self._shell

    def hello(self) -> Hello:
        return msgspec.structs.replace(
            self.make_hello(self._limits),
            segment=self.segment.name,
            inventory=self.core.inventory(),
            knows_content=self.core.knows_content,
        )
