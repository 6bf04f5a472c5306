"""The gateway's connection to the launcher, which reports the current islands and orders it to drain or retire. The
launcher also relays news between the gateways of a host."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import replace

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


class LauncherLink:
    def __init__(
        self,
        address: RouterAddress,
        me: InstanceId,
        fingerprint: Mapping[str, str],
        islands: Islands,
        on_drain: Callable[[], None],
        on_retire: Callable[[], None] = lambda: None,
        news: Callable[[], GatewayNews] | None = None,
        hear: Callable[[GatewayNews], None] = lambda news: None,
        attained: Callable[[], Attainment] | None = None,
        set_keys: Callable[[Mapping[bytes, str]], None] = lambda owners: None,
        expire_keys: Callable[[], None] | None = None,
    ) -> None:
        """`on_drain` is called when the system stops, `on_retire` when another gateway has replaced this one.

        `news` returns the report for the other gateways, and `hear` receives theirs. `attained` returns the report for
        the launcher. Reports that are None are not sent. `set_keys` receives the API keys, and `expire_keys` is called
        when the launcher has been away for KEYS_EXPIRE_S; None: they can't change."""
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
        self._on_retire = on_retire
        self._news = news
        self._hear = hear
        self._attained = attained
        self._set_keys = set_keys
        self._expire_keys = expire_keys
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
            if self._news and self._link.is_up:
                self._link.send(self._news())
            self.tell()

    def tell(self) -> None:
        """Sends the report for the launcher. It is lost without a connection."""
        if self._attained and self._link.is_up:
            self._link.send(self._attained())

    # ---- callbacks of RouterConnection ----

    def on_up(self, welcome: Welcome) -> None:
        """The launcher sends the islands and the API keys unasked."""
        self._cancel_expiry()
        self.tell()

    def on_down(self) -> None:
        """The connection retries."""
        if self._expire_keys:
            self._expiring = asyncio.get_running_loop().call_later(KEYS_EXPIRE_S, self._expire_keys)

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
                self._set_keys(owners)
            case Drain():
                self._on_drain()
            case Retire():
                self._on_retire()
            case GatewayNews():
                self._hear(message)
