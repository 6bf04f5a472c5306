"""The launcher's end of its links to gateways. It sends them the islands and API keys, and orders to drain, retire and
stop."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from alignedserve.launch.adapters import AdapterKeeper
from alignedserve.launch.growth import LatestLoad
from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.connection import new_epoch
from alignedserve.protocol.frames import WireError
from alignedserve.protocol.hub import SILENCE_S, Hub
from alignedserve.protocol.messages import (
    AdaptersChanged,
    AnyMessage,
    ApiKeys,
    Attainment,
    ChangeAdapters,
    Drain,
    GatewayNews,
    Hello,
    IslandAt,
    Membership,
    Message,
    Retire,
    ServedAdapters,
    Stop,
    Welcome,
)
from alignedserve.types import ISLAND_GATEWAY, Epoch, InstanceId, without_generation


class Seer(Protocol):
    """Learns whether a process is connected (ProcessSupervisor)."""

    def seen(self, by: str, detail: str) -> None: ...

    def unseen(self, by: str, is_dead: bool) -> None: ...


class GatewayLinks:
    def __init__(self, address: RouterAddress, gateways: Mapping[InstanceId, Seer]) -> None:
        """`gateways` are those of this host. Others are added and removed with their islands."""
        # Set before anything connects. None: the system has several machines, and no adapter is loaded while it runs.
        self.adapters: AdapterKeeper | None = None
        self._changing: set[asyncio.Task[None]] = set()
        self._address = address
        self._gateways = dict(gateways)
        self._epoch = new_epoch()
        self._hub = Hub(address.token, self, members=dict.fromkeys((*gateways, ISLAND_GATEWAY), "gateway"))
        self._membership = Membership([])
        # None where no keys are needed
        self._keys: ApiKeys | None = None
        # set for each gateway that is connected and accepts clients, by its name with the generation
        self._serving: dict[InstanceId, asyncio.Event] = {}
        # gateways that were replaced and are not supervised any more
        self._retired: set[InstanceId] = set()
        self._is_draining = False
        # objectives since the last `attained`, and the gateways that last reported late jobs
        self._num_met = self._num_missed = 0
        self._late: set[InstanceId] = set()

    async def listen(self) -> None:
        """Raises OSError when another process listens there."""
        if self._address.path is not None:
            await self._hub.listen_unix(self._address.path)
        else:
            await self._hub.listen(self._address.host, self._address.port)

    def tell(
        self,
        routers: Mapping[int, RouterAddress],
        missing: Sequence[str],
        leaving: Collection[int] = (),
        num_wanted: int = 0,
    ) -> None:
        """Says which islands there are, by their numbers, what is missing, which of them are being given back, and how
        many traffic would need."""
        islands = [
            IslandAt(number, each.host, each.port, each.path, number in leaving)
            for number, each in routers.items()
        ]
        found = Membership(islands, list(missing), num_wanted)
        if found != self._membership:
            self._membership = found
            self.tell_all(found)

    def set_keys(self, owners: Mapping[bytes, str]) -> None:
        """Sends the owners of API keys to all gateways, those included that connect later."""
        self._keys = ApiKeys(dict(owners))
        self.tell_all(self._keys)

    def attained(self) -> LatestLoad:
        """Returns the numbers of objectives met and missed since the last call."""
        seen = LatestLoad(self._num_met, self._num_missed, bool(self._late))
        self._num_met = self._num_missed = 0
        return seen

    def add(self, gateway: InstanceId, seer: Seer) -> None:
        self._gateways[gateway] = seer

    def remove(self, gateway: InstanceId) -> None:
        self._gateways.pop(gateway, None)

    def drain(self) -> None:
        self._is_draining = True
        self.tell_all(Drain())

    async def until_serving(self, gateway: InstanceId) -> None:
        """Returns when the gateway accepts clients."""
        await self._serving.setdefault(gateway, asyncio.Event()).wait()

    def retire(self, gateway: InstanceId) -> None:
        """Orders a gateway to end, because another one has taken its place."""
        self._retired.add(gateway)
        if seer := self._gateways.get(without_generation(gateway)):
            seer.unseen(gateway, is_dead=False)
        self._hub.send(gateway, Retire())

    def stop(self) -> None:
        self.tell_all(Stop())

    def close(self) -> None:
        self._hub.close()

    # ---- the hub's handler ----

    def connected(self, hello: Hello) -> None:
        to = hello.instance_id
        self._hub.send(to, Welcome(self._epoch, SILENCE_S))
        if without_generation(to) not in self._gateways:
            # Its island no longer exists.
            self._hub.send(to, Stop())
            return
        if self._keys:
            self._hub.send(to, self._keys)
        if self.adapters:
            self.adapters.gateways.present.add(to)
            self._hub.send(to, self.adapters.served)
        self._hub.send(to, self._membership)
        if self._is_draining:
            self._hub.send(to, Drain())
        if to in self._retired:
            # It may have been disconnected when the order was sent.
            self._hub.send(to, Retire())

    def received(self, hello: Hello, message: AnyMessage) -> None:
        match message:
            case Attainment(num_met=num_met, num_missed=num_missed, are_late=are_late):
                self._num_met += num_met
                self._num_missed += num_missed
                (self._late.add if are_late else self._late.discard)(hello.instance_id)
                if message.is_serving:
                    self._serves(hello)
            case ServedAdapters(number=number) if self.adapters:
                self.adapters.gateways.answered(hello.instance_id, number)
            case ChangeAdapters() if self.adapters:
                task = asyncio.create_task(self._change(hello.instance_id, message, self.adapters))
                self._changing.add(task)
                task.add_done_callback(self._changing.discard)
            case ChangeAdapters(ticket=ticket):
                reason = "adapters are loaded while the server runs on one machine only"
                self._hub.send(hello.instance_id, AdaptersChanged(ticket, 400, reason))
            case GatewayNews(gateway=gateway) if gateway == hello.instance_id:
                for other in self._hub:
                    if other.instance_id != gateway:
                        self._hub.send(other.instance_id, message)
            case _:
                raise WireError(f"a {type(message).__name__} does not come from {hello.instance_id}")

    async def _change(self, gateway: InstanceId, asked: ChangeAdapters, adapters: AdapterKeeper) -> None:
        self._hub.send(gateway, await adapters.change(asked))

    def _serves(self, hello: Hello) -> None:
        """Notes that the gateway accepts clients. Safe to repeat."""
        name = hello.instance_id
        if name not in self._retired and (seer := self._gateways.get(without_generation(name))):
            self._serving.setdefault(name, asyncio.Event()).set()
            seer.seen(name, f"pid {hello.pid}")

    def closed(self, instance_id: InstanceId, epoch: Epoch) -> None:
        # Not another event: something may wait for this one.
        if serving := self._serving.get(instance_id):
            serving.clear()
        self._late.discard(instance_id)
        if self.adapters:
            self.adapters.gateways.lost(instance_id)
        seer = self._gateways.get(without_generation(instance_id))
        if seer and instance_id not in self._retired:
            seer.unseen(instance_id, is_dead=True)

    def tell_all(self, message: Message) -> None:
        for hello in self._hub:
            self._hub.send(hello.instance_id, message)
