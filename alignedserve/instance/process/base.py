"""An instance's process: an engine, a worker on its own thread, and a connection to the router."""

from __future__ import annotations

import asyncio
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from msgspec.structs import replace

from alignedserve.engine.build import BuiltEngine, build_engine
from alignedserve.engine.engine import Engine
from alignedserve.engine.kv_cache import Allocate
from alignedserve.instance.adapters import AdapterLoader
from alignedserve.instance.config import InstanceConfig
from alignedserve.instance.live_transfers import LiveTransfers
from alignedserve.instance.loop import Messenger, Stop, WorkerLoop, WorkerThread
from alignedserve.instance.memory import BlockManager
from alignedserve.instance.profile.make import cost_of
from alignedserve.instance.worker import Worker
from alignedserve.kv.format import BlockFormat
from alignedserve.kvpool.segment import Segment, scratch_blocks
from alignedserve.process.steady import settle
from alignedserve.protocol.connection import RouterConnection, new_epoch, start_of
from alignedserve.protocol.messages import Hello
from alignedserve.protocol.signals import stop_on_sigterm
from alignedserve.scheduling.policies import make_policy
from alignedserve.timing.cost import CostModel
from alignedserve.timing.estimate import Estimate
from alignedserve.transport.channel import Identity
from alignedserve.types import Epoch

# Nice value of computing threads on cores that other processes use. Those processes, and this one's event loop, only
# pass on messages, which takes little time.
NICENESS = 10


@dataclass(frozen=True)
class Loaded:
    """The state that an instance keeps when it changes its role."""

    engine: Engine
    memory: BlockManager
    pool_format: BlockFormat
    cost: CostModel | None


class InstanceProcess(ABC):
    role: ClassVar[str]
    # A subclass of Worker.
    worker_class: ClassVar[Any]

    def __init__(self, config: InstanceConfig, other: InstanceProcess | None = None) -> None:
        """`other`: this process in the other role that it can take; None if it can take none."""
        self._config = config
        # This process in each role that it can take.
        self._in_role = {each.role: each for each in (self, other) if each}
        self._wake = threading.Event()
        # The result of `prepare`: the worker, and its Hello.
        self._built: tuple[Worker, Hello] | None = None

    def _make_worker(
        self, engine: Engine, memory: BlockManager, transfers: LiveTransfers, estimate: Estimate | None
    ) -> Worker:
        config, kind = self._config, self.worker_class
        policy = make_policy(config.scheduling)
        worker: Worker = kind(
            engine,
            transfers,
            policy,
            estimate,
            enable_prefix_caching=config.engine.enable_prefix_caching,
            memory=memory,
        )
        return worker

    @abstractmethod
    def _open(self, transfers: LiveTransfers, me: Identity) -> str:
        """Prepares for copies between instances. Returns the address where KV is staged, empty if it never is."""

    @property
    def _allocate(self) -> Allocate:
        """The allocator for the KV cache."""
        return torch.empty

    def prepare(self) -> None:
        """Loads the model and prepares everything else. Another process with this name may be serving meanwhile."""
        self._config.log.start(self._config.instance_id)
        # A thread inherits the niceness of its creator.
        with ThreadPoolExecutor(1, "build", initializer=self._be_nice) as builder:
            self._built = builder.submit(self._build, new_epoch()).result()
        settle()

    def run(self) -> None:
        """Serves until the router or SIGTERM stops it. Raises any fatal error."""
        if self._built is None:
            self.prepare()
        assert self._built
        asyncio.run(self._serve(*self._built))

    def _build(self, epoch: Epoch) -> tuple[Worker, Hello]:
        # A prefill instance's KV must be in memory that other processes can access.
        allocate = self._in_role.get("prefill", self)._allocate
        has_whole_prompts = "prefill" in self._in_role
        has_reversed = self.role == "colocated" and self._config.scheduling.share_blocks
        built = build_engine(self._config.engine, allocate, has_reversed, has_whole_prompts)
        built.engine.grammars.prepare()
        pool_format = built.engine.format.in_pool(self._config.transfers.pool_kv_dtype)
        memory = BlockManager(built.engine.limits.num_blocks, built.engine.span)
        self._loaded = Loaded(built.engine, memory, pool_format, self._cost(built))
        return self._begin(self._loaded, epoch, self._wake.set)

    def _begin(self, loaded: Loaded, epoch: Epoch, wake: Callable[[], object]) -> tuple[Worker, Hello]:
        """Makes the worker of this role from the loaded state."""
        engine, cost = loaded.engine, loaded.cost
        transfers = LiveTransfers(
            engine.cache.parts,
            epoch,
            wake,
            self._config.transfers,
            loaded.pool_format,
            engine.format.num_groups,
        )
        estimate = None if cost is None else Estimate(cost)
        worker = self._make_worker(engine, loaded.memory, transfers, estimate)
        address = self._open(transfers, self._identity(epoch, engine.format))
        return worker, self._hello(worker, epoch, address, loaded)

    def _take_role(self, role: str) -> tuple[Worker, Hello]:
        """Makes the worker of another role, after the current one was closed."""
        assert self._built
        worker, hello = self._in_role[role]._begin(self._loaded, new_epoch(), self._wake.set)
        self._built = worker, replace(hello, started_s=self._built[1].started_s)
        return self._built

    def _be_nice(self) -> None:
        """Lowers the priority of this thread and of the threads that it starts."""
        if self._config.engine.device == "cpu":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)

    def _cost(self, built: BuiltEngine) -> CostModel | None:
        """Returns the cost model; None if the configuration has none."""
        config = self._config
        if not config.needs_profile:
            return None
        return cost_of(
            built, config.engine, config.transfers.pool_kv_dtype, scratch_blocks, config.cost_profile
        )

    async def _serve(self, worker: Worker, hello: Hello) -> None:
        call = asyncio.get_running_loop().call_soon_threadsafe
        messenger = Messenger(lambda item: thread.post(item), call, lambda: link)
        loop = WorkerLoop(
            worker,
            lambda name: Segment.attach(name, self._loaded.pool_format),
            messenger.say,
            self._take_role,
            is_over=lambda: link.is_over,
            adapters=self._adapter_loader(),
        )
        thread = WorkerThread(loop, self._wake, lambda: call(link.stop), self._be_nice)
        link = RouterConnection(self._config.router, self._last_hello, messenger, waits=True)
        stop_on_sigterm(link.stop)
        thread.start()
        try:
            await link.run()
        finally:
            thread.post(Stop())
            await asyncio.to_thread(thread.join)
        if thread.error is not None:
            raise thread.error

    def _adapter_loader(self) -> AdapterLoader | None:
        places = self._loaded.engine.adapter_places
        return AdapterLoader(places, self._wake.set) if places and places.can_load else None

    def _fingerprint(self, form: BlockFormat) -> dict[str, str]:
        engine = self._config.engine
        return form.describe() | {
            "model": engine.model,
            "quantization": engine.quantization or "none",
            "adapters": engine.adapter_names,
        }

    def _identity(self, epoch: Epoch, form: BlockFormat) -> Identity:
        """Returns the identity that both ends of a KV link compare. KV between instances has the instances' own
        format."""
        return Identity(self._config.instance_id, epoch, self._fingerprint(form), self._config.router.token)

    def _last_hello(self) -> Hello:
        """A later router gets the Hello of the current role."""
        assert self._built
        return self._built[1]

    def _hello(self, worker: Worker, epoch: Epoch, address: str, loaded: Loaded) -> Hello:
        return Hello(
            role=self.role,
            instance_id=self._config.instance_id,
            epoch=epoch,
            pid=os.getpid(),
            fingerprint=self._fingerprint(loaded.pool_format)
            | {"link": self._config.transfers.transport, "window": str(worker.limits.window)},
            limits=replace(worker.limits, num_adapter_places=self._config.engine.num_adapter_places),
            link=address,
            cost=loaded.cost,
            started_s=start_of(epoch),
        )
