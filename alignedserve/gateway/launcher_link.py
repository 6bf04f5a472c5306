"""The gateway's connection to the launcher, which reports the current islands and orders it to drain or retire. The
launcher also relays news between the gateways of a host."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

from alignedserve.gateway.config import GatewayConfig
from alignedserve.gateway.ending import Ending
from alignedserve.gateway.http.keys import Keys
from alignedserve.gateway.http.server import HttpServer
from alignedserve.gateway.islands.islands import Islands
from alignedserve.gateway.openai.adapters import AdapterChanges
from alignedserve.gateway.services import StoreServices
from alignedserve.gateway.telemetry.exposition import Gateways, written
from alignedserve.gateway.telemetry.metrics import AttainmentCount, Metrics
from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.connection import RouterConnection, new_epoch, start_of
from alignedserve.protocol.messages import (
    AdaptersChanged,
    AnyMessage,
    ApiKeys,
    Attainment,
    Drain,
    GatewayNews,
    Hello,
    InstanceLimits,
    Membership,
    Retire,
    ServedAdapters,
    Welcome,
)
from alignedserve.types import is_island_gateway

# seconds between two reports
NEWS_S = 1.0
# Seconds without a connection after which API keys expire, because one of them may have been revoked since.
KEYS_EXPIRE_S = 60.0


class Reports:
    """What gateways tell the launcher, and through it each other."""

    def __init__(
        self, config: GatewayConfig, metrics: Metrics, services: StoreServices, gateways: Gateways | None
    ) -> None:
        """`gateways` are those at this port, if there are several."""
        self._config = config
        self._metrics = metrics
        self._services = services
        self._gateways = gateways
        self._attainment = AttainmentCount(metrics.of("rt"))

    def news(self) -> GatewayNews | None:
        """Returns the report for the other gateways, if there are any."""
        if not self._gateways and not self._config.has_island_gateways:
            return None
        metrics = written(self._metrics) if self._gateways else b""
        return GatewayNews(self._config.instance_id, metrics, self._services.estimates())

    def hear(self, news: GatewayNews) -> None:
        """Receives the report of another gateway."""
        # Prometheus scrapes each host by itself, so metrics of gateways on other hosts are not merged.
        if self._gateways and not is_island_gateway(news.gateway):
            self._gateways.hear(news.gateway, news.metrics)
        self._services.hear(news)

    def attained(self, is_serving: bool) -> Attainment:
        """Returns the report for the launcher. `is_serving`: whether the gateway accepts clients."""
        return self._attainment.take(self._services.are_late, is_serving)


class LauncherLink:
    def __init__(
        self,
        address: RouterAddress,
        config: GatewayConfig,
        islands: Islands,
        keys: Keys,
        ending: Ending,
        server: HttpServer,
        reports: Reports,
        adapters: AdapterChanges,
    ) -> None:
        epoch = new_epoch()
        hello = Hello(
            "gateway",
            config.instance_id,
            epoch,
            os.getpid(),
            dict(config.fingerprint),
            InstanceLimits(),
            started_s=start_of(epoch),
        )
        self._address = address
        self._islands = islands
        self._keys = keys
        self._keys_may_change = config.keys_may_change
        self._ending = ending
        self._server = server
        self._reports = reports
        self._adapters = adapters
        self._is_serving = False
        self._expiring: asyncio.TimerHandle | None = None
        self._link = RouterConnection(address, lambda: hello, self)

    async def run(self) -> None:
        """Runs the islands until they are stopped, or until the launcher or all routers have sent Stop. Without a
        connection to the launcher, the islands do not change."""
        telling = [asyncio.create_task(each) for each in (self._tell_start(), self._tell_regularly())]
        running = [asyncio.create_task(each.run()) for each in (self._islands, self._link)]
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            self._islands.stop()
            self._link.stop()
            await asyncio.gather(*running)
        finally:
            for each in telling:
                each.cancel()
            self._cancel_expiry()

    async def _tell_start(self) -> None:
        await self._server.until_started()
        self._is_serving = True
        self._tell()

    async def _tell_regularly(self) -> None:
        while True:
            await asyncio.sleep(NEWS_S)
            if self._link.is_up and (news := self._reports.news()):
                self._link.send(news)
            self._tell()

    def _tell(self) -> None:
        """Sends the report for the launcher. Without a connection there is none."""
        if self._link.is_up:
            self._link.send(self._reports.attained(self._is_serving))

    # ---- callbacks of RouterConnection ----

    def on_up(self, welcome: Welcome) -> None:
        """The launcher sends the islands and the API keys unasked."""
        self._cancel_expiry()
        self._adapters.send = self._link.send
        self._tell()

    def on_down(self) -> None:
        """The connection retries."""
        self._adapters.lost()
        if self._keys_may_change:
            self._expiring = asyncio.get_running_loop().call_later(KEYS_EXPIRE_S, self._keys.expire)

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
            case ServedAdapters(adapters=adapters):
                self._adapters.serve(adapters)
                self._link.send(message)
            case AdaptersChanged():
                self._adapters.made(message)
            case ApiKeys(owners=owners):
                self._keys.change(owners)
            case Drain():
                self._ending.drain()
            case Retire():
                self._ending.retire(self._server)
            case GatewayNews():
                self._reports.hear(message)
