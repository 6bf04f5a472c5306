"""A prefill and a decode instance as real processes, with a router's socket and the pool's segment, driven by
`Rules`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from alignedserve.kv.format import BlockFormat
from alignedserve.kvpool.segment import Segment
from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.hub import Hub
from alignedserve.protocol.messages import AnyMessage, Hello, UsePool, Welcome
from alignedserve.types import Epoch, InstanceId
from tests.instance import serve
from tests.island import Rules

TOKEN = "of this test"
# The format of the tiny models with two KV heads.
FORM = BlockFormat(num_layers=3, block_size=16, num_kv_heads=2, head_dim=16, dtype="float32")
NUM_POOL_BLOCKS = 512
PREFILL, DECODE = InstanceId("prefill-0"), InstanceId("decode-0")
ROLES = {PREFILL: "prefill", DECODE: "decode"}
START_S = 120.0


class RemoteIsland:
    """An asynchronous context that leaves no process, segment or socket behind."""

    def __init__(self, directory: Path) -> None:
        self.name = f"alignedserve-test-{os.getpid()}-{id(self):x}"
        self.segment = Segment.create(self.name, FORM, NUM_POOL_BLOCKS)
        self.rules = Rules(self.segment.table, FORM.block_size, self._to(PREFILL), self._to(DECODE))
        self.rules.evict_slack = 64
        self.processes: dict[InstanceId, BaseProcess] = {}
        self.hellos: dict[InstanceId, Hello] = {}
        self.on_report: Callable[[], None] = lambda: None
        self.epoch = Epoch(1)
        self._directory = directory
        self._port = 0
        self._changed = asyncio.Event()

    async def __aenter__(self) -> RemoteIsland:
        await self.listen()
        for instance_id in ROLES:
            self.start(instance_id)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.hub.close()
        for process in self.processes.values():
            process.kill()
            process.join()
        self.segment.close()
        Segment.unlink(self.name)

    # ---- for tests --------------------------------------------------------------------------------------------------

    async def listen(self) -> None:
        # Only the end of its connection shows that an instance is gone.
        self.hub = Hub(TOKEN, self, silence_s=3600.0)
        self._port = await self.hub.listen("127.0.0.1", self._port)

    def start(self, instance_id: InstanceId) -> None:
        router = RouterAddress("127.0.0.1", self._port, TOKEN)
        self.processes[instance_id] = serve.start(ROLES[instance_id], instance_id, router, self._directory)

    async def until(self, is_done: Callable[[], object], timeout_s: float = START_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not is_done():
                self._changed.clear()
                await self._changed.wait()

    async def until_up(self) -> None:
        await self.until(lambda: self.hellos.keys() == ROLES.keys())

    async def ended(self, instance_id: InstanceId) -> int:
        """Waits until it has ended, and returns its exit code."""
        process = self.processes[instance_id]
        await asyncio.to_thread(process.join, START_S)
        assert process.exitcode is not None, f"{instance_id} does not end"
        return process.exitcode

    def order(self) -> None:
        if self.hellos.keys() == ROLES.keys():
            self.rules.order()

    # ---- the hub's handler ------------------------------------------------------------------------------------------

    def connected(self, hello: Hello) -> None:
        self.hellos[hello.instance_id] = hello
        self.hub.send(hello.instance_id, Welcome(self.epoch))
        self.hub.send(hello.instance_id, UsePool(self.name))
        self.order()
        self._changed.set()

    def received(self, hello: Hello, message: AnyMessage) -> None:
        self.rules.received(message)
        self.on_report()
        self.order()
        self._changed.set()

    def closed(self, instance_id: InstanceId, epoch: Epoch) -> None:
        self.hellos.pop(instance_id, None)
        self._lost(instance_id)
        self._changed.set()

    def _lost(self, instance_id: InstanceId) -> None:
        """Its requests continue with what the pool has of them."""
        places = ("prefill",) if instance_id == PREFILL else ("decode", "running", "evicting", "leaving")
        for entry in self.rules.entries.values():
            if entry.place in places:
                entry.place = "queued" if not entry.is_finished else "over"

    def _to(self, instance_id: InstanceId) -> Callable[[AnyMessage], None]:
        return lambda message: self.hub.send(instance_id, message)
