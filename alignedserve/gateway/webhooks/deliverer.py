"""Delivers webhooks, each at least once, until the receiver answers 2xx or a day has passed.

Until then, a delivery is in the store. The gateway that attempts it holds its lease. If that gateway dies, the lease
expires and another one takes over.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import ssl
import time
from collections import Counter
from collections.abc import Sequence
from urllib.parse import urlsplit

import httpcore2
import httpx2
from msgspec.structs import replace

from alignedserve.gateway.webhooks.config import WebhookConfig
from alignedserve.gateway.webhooks.network import PublicNetwork
from alignedserve.store import Delivery, DeliveryStore, Lease
from alignedserve.store.leased_work import LeasedWork
from alignedserve.store.polling import StorePoller
from alignedserve.store.retry import retried
from alignedserve.version import __version__

log = logging.getLogger(__name__)

# Deliveries that are attempted at a time: enough that some receivers that hang do not hold up the others.
MAX_AT_A_TIME = 32
_FACTOR = 3


class Deliverer:
    def __init__(
        self,
        store: DeliveryStore,
        config: WebhookConfig,
        secrets: Sequence[bytes],
        counts: Counter[str],
        name: str,
    ) -> None:
        """`counts` counts attempts by outcome, and dropped deliveries. `name` is this gateway's name as a holder of
        leases, for people to read."""
        self._store = store
        self._config = config
        self._secrets = secrets
        self._counts = counts
        self._name = name
        # Follows no redirects, uses no proxies, keeps no connections.
        self._http = httpcore2.AsyncConnectionPool(
            ssl_context=httpx2.create_ssl_context(),
            max_connections=MAX_AT_A_TIME,
            max_keepalive_connections=0,
            network_backend=PublicNetwork(config.allow_private),
        )
        self._leased = LeasedWork(store.release, lambda _: self._poller.wake(), "webhook")
        self._poller = StorePoller(self._look, config.look_s, "webhooks")

    def stop(self) -> None:
        """Stops. Deliveries in progress are attempted again after the next start, or by another gateway."""
        self._poller.stop()

    async def run(self) -> None:
        """Runs until it is stopped."""
        try:
            await self._poller.run()
        finally:
            await self._leased.cancel()
            await self._http.aclose()

    async def _look(self) -> None:
        if free := MAX_AT_A_TIME - len(self._leased.tasks):
            # Twice the time of an attempt, to leave time for what follows it.
            lease_s = 2 * self._config.try_s
            for lease in await self._store.take(self._name, lease_s, time.time(), free):
                self._leased.begin(lease, self._work)
        if refused := await self._store.refused():
            self._counts["dropped"] += refused
            log.warning("webhooks: %d dropped, because too many are pending", refused)

    async def _work(self, lease: Lease) -> None:
        delivery = await retried(self._store.get, lease)
        if delivery is None:
            return
        problem = await self._tried(delivery)
        if problem is None:
            self._counts["delivered"] += 1
            await retried(self._store.end, lease)
        else:
            self._counts["failed"] += 1
            await self._try_again(lease, delivery, problem)

    async def _tried(self, delivery: Delivery) -> str | None:
        """Posts the event. Returns what went wrong. None: it was delivered."""
        headers = signed_headers(delivery.event_id, time.time(), delivery.body, self._secrets)
        headers |= {
            "content-type": "application/json",
            "user-agent": f"alignedserve/{__version__}",
            "connection": "close",
        }
        sent = [(name.encode(), value.encode()) for name, value in headers.items()]
        try:
            async with (
                asyncio.timeout(self._config.try_s),
                # The answer's body is not read.
                self._http.stream("POST", delivery.url, headers=sent, content=delivery.body) as answer,
            ):
                return None if 200 <= answer.status < 300 else f"it answers {answer.status}"
        except TimeoutError:
            return f"it takes more than {self._config.try_s:g} s"
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException) as error:
            return str(error) or type(error).__name__
        except (OSError, ssl.SSLError) as error:
            return str(error)

    async def _try_again(self, lease: Lease, delivery: Delivery, problem: str) -> None:
        config, now = self._config, time.time()
        pause_s = min(config.max_retry_s, config.retry_s * _FACTOR ** min(delivery.num_tries, 20))
        tried = replace(delivery, num_tries=delivery.num_tries + 1)
        # A part of the URL may be a secret between its owner and the receiver.
        host = urlsplit(delivery.url).hostname
        if now + pause_s > delivery.created_at + config.give_up_s:
            self._counts["dropped"] += 1
            log.warning(
                "webhook %s to %s is dropped after %d tries: %s",
                *(delivery.event_id, host, tried.num_tries, problem),
            )
            await retried(self._store.end, lease)
        else:
            log.info(
                "webhook %s to %s is tried again in %.0f s: %s", delivery.event_id, host, pause_s, problem
            )
            await retried(self._store.put_off, lease, tried, now + pause_s)


def signed_headers(event_id: str, now: float, body: bytes, secrets: Sequence[bytes]) -> dict[str, str]:
    """Returns the headers. Each secret signs, because a receiver may have the older or the newer one."""
    text = f"{event_id}.{int(now)}.".encode() + body
    signatures = [
        base64.b64encode(hmac.new(each, text, hashlib.sha256).digest()).decode() for each in secrets
    ]
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(int(now)),
        "webhook-signature": " ".join(f"v1,{each}" for each in signatures),
    }
