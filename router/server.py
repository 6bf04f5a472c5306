"""The shell around the pure core, live and in virtual time: messages become events, and orders go out on connections.

Messages about processes rather than requests (status, shutdown) are answered here and never reach the core.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence

from alignedserve.process.steady import collect_when_idle
from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.connection import start_of
from alignedserve.protocol.frames import WireError
from alignedserve.protocol.hub import Hub
from alignedserve.protocol.messages import (
    Abort,
    AdaptersSet,
    AnyMessage,
    AskCluster,
    Candidates,
    Cluster,
    DecodeReport,
    Drain,
    Echo,
    Failed,
    Gone,
    Hello,
    InstanceLimits,
    PoolUse,
    PrefillReport,
    Reserved,
    ResetPrefixCache,
    SetAdapters,
    Stop,
    Submit,
)
from alignedserve.router.eventlog import EventLog
from alignedserve.router.events import Closed, Connected, Event, Observer, Received, Tick
from alignedserve.router.fence import DisconnectedWriters, LiveRouterHost, RouterHost
from alignedserve.router.router import Router
from alignedserve.router.status import LoadMeter, UsageOf, describe, unknown_usage
from alignedserve.types import GATEWAY, LAUNCHER, Epoch, InstanceId

logger = logging.getLogger(__name__)

# Seconds between ticks of the core. Nothing in it waits for less.
TICK_S = 0.1
# Seconds between reports of the load to gateways and the launcher.
LOAD_S = 0.25

# The messages that each role may send. Any other message closes the connection.
_MAY_SEND: dict[str, tuple[type[AnyMessage], ...]] = {
    "kvpool": (Reserved, Candidates, PoolUse),
    "prefill": (PrefillReport, Gone, Failed, AdaptersSet),
    "decode": (DecodeReport, Gone, Failed, AdaptersSet),
    "colocated": (DecodeReport, Gone, Failed, AdaptersSet),
    "gateway": (Submit, Abort, Echo, AskCluster, ResetPrefixCache),
    "launcher": (AskCluster, Drain, Stop, SetAdapters),
}


class RouterServer:
    def __init__(
        self,
        router: Router,
        epoch: Epoch,
        token: str,
        expected: dict[InstanceId, str] | None = None,
        event_log: EventLog | None = None,
        gateways: Sequence[InstanceId] = (GATEWAY,),
        host: RouterHost | None = None,
        usage_of: UsageOf | None = None,
    ) -> None:
        """`expected`: the role of each process that should exist. Beside them, only gateways with these names and the
        launcher may connect. `usage_of` is called on a thread, because it takes long; None: it is not known."""
        self._host = host or LiveRouterHost()
        self._usage_of = usage_of
        self._router = router
        self._me = Hello(
            "router",
            InstanceId("router"),
            epoch,
            os.getpid(),
            {},
            InstanceLimits(),
            started_s=start_of(epoch),
        )
        self._expected = expected or {}
        self._log = event_log
        # Called after each step of the core.
        self.observers: list[Observer] = []
        members = self._expected | dict.fromkeys(gateways, "gateway") | {LAUNCHER: "launcher"}
        self.hub = Hub(
            token,
            self,
            router.state.config.silence_s,
            self._silent,
            members,
            self._puts_off,
            router.changing_roles,
            self._host,
        )
        self._parting = DisconnectedWriters(router.state.config.silence_s, self._host)
        # The Hello of each connected process.
        self._hellos: dict[InstanceId, Hello] = {}
        self._pool_use: PoolUse | None = None
        self._over: asyncio.Future[None] | None = None
        # Answers to AskCluster that wait for `usage_of`.
        self._answering: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> int:
        """Returns the port. Raises OSError if it is taken."""
        self._over = asyncio.get_running_loop().create_future()
        return await self.hub.listen(host, port)

    async def listen_at(self, address: RouterAddress) -> None:
        """Raises OSError if another process listens there."""
        if address.path is None:
            await self.listen(address.host, address.port)
            return
        self._over = asyncio.get_running_loop().create_future()
        await self.hub.listen_unix(address.path)

    async def run(self) -> None:
        """Runs until a launcher sends Stop, or `stop` is called. Raises any error of the core, because its state is
        unreliable after that."""
        assert self._over, "listen first"
        tasks = [
            asyncio.create_task(self._repeat_tick()),
            asyncio.create_task(self._tell_load()),
            asyncio.create_task(collect_when_idle(lambda: self._router.is_idle)),
        ]
        for task in tasks:
            task.add_done_callback(self._task_ended)
        try:
            await self._over
        finally:
            for task in [*tasks, *self._answering]:
                task.cancel()
            self.hub.close()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Ends `run` with the error of a task. Without its ticks the router would look healthy and decide nothing."""
        if not task.cancelled() and (error := task.exception()) and self._over and not self._over.done():
            self._over.set_exception(error)

    def stop(self) -> None:
        """Tells all processes to stop, and makes `run` return. Safe to repeat."""
        for hello in self.hub:
            self.hub.send(hello.instance_id, Stop())
        if self._over and not self._over.done():
            self._over.set_result(None)

    # ---- callbacks of the hub ----

    def _silent(self, hello: Hello) -> None:
        if self._host.kill_user(hello.pid, self._parting.segment):
            logger.warning("Killed %s, process %d", hello.instance_id, hello.pid)

    def connected(self, hello: Hello) -> None:
        self._hellos[hello.instance_id] = hello
        if hello.role == "kvpool":
            self._parting.segment = hello.segment
        if parted := self._parting.back(hello):
            self._tell_core(Closed(parted.instance_id, parted.epoch))
        self._tell_core(Connected(hello))
        self._tell_launchers()

    def closed(self, instance_id: InstanceId, epoch: Epoch) -> None:
        hello = self._hellos.pop(instance_id)
        if not self._is_over and not self._parting.add(hello):
            self._tell_core(Closed(instance_id, epoch))
        self._tell_launchers()

    def _puts_off(self, hello: Hello) -> bool:
        """Returns whether a process has connected too early. A pool is accepted only when no unconnected process could
        write to it, and an instance when it can be told its adapters."""
        if self._router.puts_off(hello):
            return True
        pids = {each.pid for each in self._hellos.values()}
        return hello.role == "kvpool" and self._parting.puts_off(hello, pids)

    def received(self, hello: Hello, message: AnyMessage) -> None:
        if not isinstance(message, _MAY_SEND[hello.role]):
            raise WireError(f"a {type(message).__name__} must not come from a {hello.role}")
        match message:
            case PoolUse():
                self._pool_use = message
            case AskCluster(ticket=ticket):
                self._answer(hello.instance_id, ticket)
            case Echo():
                self.hub.send(hello.instance_id, message)
            case Drain():
                self._tell_all("gateway", message)
            case Stop():
                self.stop()
            case _:
                self._tell_core(Received(hello.instance_id, message))

    # ---- the core ----

    @property
    def _is_over(self) -> bool:
        return self._over is not None and self._over.done()

    def _tell_core(self, event: Event) -> None:
        if self._is_over:
            return
        try:
            now = self._host.now()
            if self._log:
                self._log.append(now, event)
            orders = self._router.on(event, now)
            if self._log:
                self._log.answered(orders)
            for observe in self.observers:
                observe(now, event, orders)
            for send in orders:
                self.hub.send(send.to, send.message)
        except Exception as error:
            if self._over is None:
                raise
            self._over.set_exception(error)

    def is_here(self, name: InstanceId) -> bool:
        """Returns whether the core may send to the process: it is connected, or the core does not know yet that it is
        not."""
        return name in self.hub or name in self._parting

    def tick(self) -> None:
        for hello in self._parting.take_gone():
            self._tell_core(Closed(hello.instance_id, hello.epoch))
        if not self._router.is_idle:
            self._tell_core(Tick())

    async def _repeat_tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()
            for remark in self._router.take_remarks():
                logger.warning(remark)

    async def _tell_load(self) -> None:
        meter = LoadMeter(self._router)
        while True:
            load = meter.read(self._host.now())
            for role in ("gateway", "launcher"):
                self._tell_all(role, load)
            await asyncio.sleep(LOAD_S)

    def _answer(self, to: InstanceId, ticket: int) -> None:
        """Sends the status of the island."""
        if self._usage_of is None:
            self.hub.send(to, self._describe(ticket))
            return
        task = asyncio.create_task(self._answer_with_usage(to, ticket, self._usage_of))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer_with_usage(self, to: InstanceId, ticket: int, usage_of: UsageOf) -> None:
        pids = [
            self._me.pid,
            *(hello.pid for hello in self.hub if hello.role not in ("gateway", "launcher")),
        ]
        found = await asyncio.to_thread(lambda: {pid: usage_of(pid) for pid in pids})
        self.hub.send(to, self._describe(ticket, found.get))

    def _describe(self, ticket: int, usage_of: UsageOf = unknown_usage) -> Cluster:
        return describe(self._router, self._me, self.hub, self._expected, self._pool_use, ticket, usage_of)

    def _tell_launchers(self) -> None:
        self._tell_all("launcher", self._describe(ticket=0))

    def _tell_all(self, role: str, message: AnyMessage) -> None:
        for hello in self.hub:
            if hello.role == role:
                self.hub.send(hello.instance_id, message)
