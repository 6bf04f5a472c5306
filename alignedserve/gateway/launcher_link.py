"""What the launcher tells the gateway: which islands there are, and when to end."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from alignedserve.gateway.islands import Islands
from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.connection import RouterConnection, new_epoch, start_of
from alignedserve.protocol.messages import AnyMessage, Drain, Hello, InstanceLimits, Membership, Welcome
from alignedserve.types import InstanceId


class LauncherLink:
    def __init__(
        self,
        address: RouterAddress,
        me: InstanceId,
        fingerprint: Mapping[str, str],
        islands: Islands,
        on_drain: Callable[[], None],
    ) -> None:
        epoch = new_epoch()
        hello = Hello(
            "gateway",
            me,
            epoch,
            os.getpid(),
            dict(fingerprint),
            InstanceLimits(),
            started_s=start_of(epoch),
        )
        self._address = address
        self._islands = islands
        self._on_drain = on_drain
        self._link = RouterConnection(address, lambda: hello, self)

    async def run(self) -> None:
        """Runs until the launcher sends Stop, or until `stop`. While the launcher is away, the islands stay as they
        are."""
        await self._link.run()

    def stop(self) -> None:
        self._link.stop()

    # ---- what the link hears ----

    def on_up(self, welcome: Welcome) -> None:
        """The launcher says by itself which islands there are."""

    def on_down(self) -> None:
        """It may be back."""

    def on_message(self, message: AnyMessage) -> None:
        match message:
            case Membership(islands=islands, missing=missing):
                self._islands.missing = missing
                routers = {
                    each.number: replace(self._address, host=each.host, port=each.port, path=each.path)
                    for each in islands
                }
                if routers:
                    self._islands.set(routers)
            case Drain():
                self._on_drain()
