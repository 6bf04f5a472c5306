"""Deliveries of webhooks that are pending: they are stored together with what they tell of, in one step, and stay until
they are delivered, or given up.

A delivery is made by the holder of its lease, as a job is (base.py), so that what dies with a gateway is delivered by
another one. All methods raise StoreAway, and may be repeated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NewType

import msgspec

from alignedserve.store.base import Lease

DeliveryId = NewType("DeliveryId", str)

# So many may be pending. Those that come on top of them are not stored, and counted.
MAX_PENDING = 10_000


class Delivery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: DeliveryId
    # The id that the receiver sees, the same at each try.
    event_id: str
    url: str
    # The event, as JSON.
    body: bytes
    # Seconds since 1970.
    created_at: int
    # The tries that have failed.
    num_tries: int = 0


class DeliveryStore(ABC):
    @abstractmethod
    async def take(self, holder: str, seconds: float, now: float, count: int) -> list[Lease]:
        """Takes the leases of at most `count` deliveries which are due and which nobody holds. `holder` is for people
        to read."""

    @abstractmethod
    async def get(self, lease: Lease) -> Delivery | None: ...

    @abstractmethod
    async def end(self, lease: Lease) -> None:
        """Deletes the delivery. Raises LeaseLost."""

    @abstractmethod
    async def put_off(self, lease: Lease, delivery: Delivery, due_at: float) -> None:
        """Stores the delivery as it is now, to be tried again, and releases the lease. Raises LeaseLost."""

    @abstractmethod
    async def release(self, lease: Lease) -> None:
        """Does nothing when the lease is lost."""

    @abstractmethod
    async def refused(self) -> int:
        """Returns how many were not stored since the last call."""
