"""The responses that are stored: OpenAI's Responses keep a conversation for its next turn, and a response may be
answered in the background.

A response that is not over is worked on by the holder of its lease, as a job is (base.py). It is over when its status
is one of OVER, and stays as it is from then on, until it is deleted or expires. All methods raise StoreAway, and may
be repeated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, NewType

import msgspec

from alignedserve.store.base import Lease, LeaseState
from alignedserve.store.deliveries import Delivery

ResponseId = NewType("ResponseId", str)

ResponseStatus = Literal["queued", "completed", "incomplete", "failed", "cancelled"]
OVER = ("completed", "incomplete", "failed", "cancelled")


class ResponseRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: ResponseId
    # The owner (gateway/http/keys.py); "" where no keys are needed.
    owner: str = ""
    status: ResponseStatus
    # Seconds since 1970.
    created_at: int
    expires_at: int
    # The response before it: its conversation goes on here.
    previous_id: ResponseId | None = None
    # The items of the input, and OpenAI's object, as JSON.
    input_items: bytes
    body: bytes
    # The body of the call, as JSON, as long as it is not answered.
    call: bytes = b""

    @property
    def is_over(self) -> bool:
        return self.status in OVER


class ResponseStore(ABC):
    @abstractmethod
    async def add(self, record: ResponseRecord) -> None:
        """Raises StoreFull, and TooManyJobs if it is not over and there are as many of those as there may be."""

    @abstractmethod
    async def get(self, response_id: ResponseId) -> ResponseRecord | None: ...

    @abstractmethod
    async def replace(
        self,
        old: ResponseRecord,
        new: ResponseRecord,
        lease: Lease | None,
        deliveries: Sequence[Delivery] = (),
    ) -> bool:
        """Replaces the response, and stores `deliveries` in the same step; returns False if it is not `old` any more.
        `lease` is the holder's (LeaseLost is raised if it was lost); None for other callers. When the response is over
        after this, its lease is deleted."""

    @abstractmethod
    async def delete(self, record: ResponseRecord) -> None: ...

    @abstractmethod
    async def expired(self, now: float) -> list[ResponseRecord]:
        """Returns some of the responses that have expired."""

    @abstractmethod
    async def take(self, holder: str, seconds: float, count: int) -> list[Lease]:
        """Takes the leases of at most `count` responses which are not over and which nobody holds, the oldest first.
        `holder` is for people to read."""

    @abstractmethod
    async def renew(self, leases: Sequence[Lease], seconds: float) -> list[LeaseState]: ...

    @abstractmethod
    async def release(self, lease: Lease) -> None: ...

    @abstractmethod
    async def begin(self, lease: Lease) -> int:
        """Records that the response begins. Returns how often it had begun when another holder took it without a
        release by the one before: the response may have killed that gateway. Raises LeaseLost."""
