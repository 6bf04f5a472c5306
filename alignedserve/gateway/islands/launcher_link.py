"""The gateway's connection to the launcher, which reports the current islands and orders it to drain or retire. The
launcher also relays news between the gateways of a host."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from alignedserve.gateway.islands.islands import Islands
from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.connection import RouterConnection, new_epoch, start_of
from alignedserve.protocol.messages import (
    AnyMessage,
    ApiKeys,
    Attainment,
    Drain,
    GatewayNews,
    Hello,
    InstanceLimits,
    Membership,
    Retire,
    Welcome,
)
from alignedserve.types import InstanceId

# seconds between two reports
NEWS_S = 1.0
# Seconds without a connection after which API keys expire, because one of them may have been revoked since.
KEYS_EXPIRE_S = 60.0


@dataclass(frozen=True)
class LauncherActions:
    """What the gateway does for the launcher."""

    # Called when the system stops.
    drain: Callable[[], None]
    # Called when another gateway has replaced this one.
    retire: Callable[[], None] = lambda: None
    # Returns the report for the other gateways. None: no report is sent.
    news: Callable[[], GatewayNews] | None = None
    # Receives the reports of the other gateways.
    hear: Callable[[GatewayNews], None] = lambda news: None
    # Returns the report for the launcher. None: no report is sent.
    attained: Callable[[], Attainment] | None = None
    # Receives the API keys.
    set_keys: Callable[[Mapping[bytes, str]], None] = lambda owners: None
    # Called when the launcher has been away for KEYS_EXPIRE_S. None: the keys can't change.
    expire_keys: Callable[[], None] | None = None


class LauncherLink:
    def __init__(
        self,
        address: RouterAddress,
        me: InstanceId,
        fingerprint: Mapping[str, str],
        islands: Islands,
        actions: LauncherActions,
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
        self._actions = actions
        self._expiring: asyncio.TimerHandle | None = None
        self._link = RouterConnection(address, lambda: hello, self)

    async def run(self) -> None:
        """Runs until `stop`, or until the launcher sends Stop. Without a connection, the islands do not change."""
        telling = asyncio.create_task(self._tell())
        try:
            await self._link.run()
        finally:
            telling.cancel()
            self._cancel_expiry()

    def stop(self) -> None:
        self._link.stop()

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(NEWS_S)
            if self._actions.news and self._link.is_up:
                self._link.send(self._actions.news())
            self.tell()

    def tell(self) -> None:
        """Sends the report for the launcher. It is lost without a connection."""
        if self._actions.attained and self._link.is_up:
            self._link.send(self._actions.attained())

    # ---- callbacks of RouterConnection ----

    def on_up(self, welcome: Welcome) -> None:
        """The launcher sends the islands and the API keys unasked."""
        self._cancel_expiry()
        self.tell()

    def on_down(self) -> None:
        """The connection retries."""
        if self._actions.expire_keys:
            self._expiring = asyncio.get_running_loop().call_later(KEYS_EXPIRE_S, self._actions.expire_keys)

    def _cancel_expiry(self) -> None:
        if self._expiring:
            self._expiring.cancel()

    def on_message(self, message: AnyMessage) -> None:
        match message:
            case Membership(islands=islands, missing=missing, num_wanted=num_wanted):
                self._islands.missing = missing
                self._islands.num_wanted = num_wanted
                routers = {
                    each.number: replace(self._address, host=each.host, port=each.port, path=each.path)
                    for each in islands
                }
                if routers:
                    leaving = {each.number for each in islands if each.is_leaving}
                    self._islands.set(routers, leaving)
            case ApiKeys(owners=owners):
                self._actions.set_keys(owners)
            case Drain():
                self._actions.drain()
            case Retire():
                self._actions.retire()
            case GatewayNews():
                self._actions.hear(message)
