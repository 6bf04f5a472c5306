"""Copies of one kind at one process: one after the other, as long as the channel says."""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.cost import Channel
from alignedserve.sim.process import SimProcess


class Copies:
    def __init__(self, process: SimProcess, channel: Channel, block_bytes: int) -> None:
        self._process = process
        self._channel = channel
        self._block_bytes = block_bytes
        self._free_s = 0.0

    def start(self, num_blocks: int, done: Callable[[], None]) -> None:
        now = self._process.world.clock.now
        self._free_s = max(self._free_s, now) + self._channel.seconds(num_blocks * self._block_bytes)
        self._process.after(self._free_s - now, done)
