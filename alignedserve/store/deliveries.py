"""Pending deliveries of webhooks. A delivery is stored atomically with the change that it announces, and is kept until
it succeeds or is given up.

The holder of its lease makes the delivery, as for a job (base.py). So another gateway delivers what a dead one could
not. All methods raise StoreAway and may be repeated.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NewType

import msgspec

from alignedserve.store.records import Lease, Leases

DeliveryId = NewType("DeliveryId", str)

# The most pending deliveries. Further ones are only counted.
MAX_PENDING = 10_000


class Delivery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: DeliveryId
    # The id in the event, the same for each try.
    event_id: str
    url: str
    # The event as JSON.
    body: bytes
    # Seconds since 1970.
    created_at: int
    # Failed tries so far.
    num_tries: int = 0


class DeliveryStore(Leases):
    @abstractmethod
    async def take(self, holder: str, seconds: float, now: float, count: int) -> list[Lease]:
        """Takes the leases of at most `count` due deliveries that have no holder. `holder` is a name for people to
        read."""

    @abstractmethod
    async def get(self, lease: Lease) -> Delivery | None: ...

    @abstractmethod
    async def end(self, lease: Lease) -> None:
        """Deletes the delivery. Raises LeaseLost."""

    @abstractmethod
    async def put_off(self, lease: Lease, delivery: Delivery, due_at: float) -> None:
        """Stores the delivery for another try and releases the lease. Raises LeaseLost."""

    @abstractmethod
    async def refused(self) -> int:
        """Returns the number of deliveries that were refused since the last call."""
