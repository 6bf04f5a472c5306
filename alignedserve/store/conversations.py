"""Stored conversations, as in OpenAI's API. Calls, and responses when they end, add items to them.

The items are one part, which is read in pieces: comma-separated JSON. New items are appended. A deleted item leaves a
gap. When there are many gaps, the part is rewritten, with another layout. Positions apply to one layout. All methods
raise StoreAway and may be repeated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from alignedserve.store.base import Order
from alignedserve.store.responses import ConversationId, ItemPage, Pieces, Span


@dataclass(frozen=True)
class ConversationHead:
    id: ConversationId
    # The owner (gateway/http/keys.py); "" if no keys are required.
    owner: str
    # Seconds since 1970.
    created_at: int
    # OpenAI's object as JSON.
    state: bytes
    # How often its items were rewritten.
    layout: int = 0
    num_items: int = 0
    # Ranges of items in the part. Commas separate the items in each.
    spans: Sequence[Span] = ()

    @property
    def num_bytes(self) -> int:
        """Size in bytes of all items and the commas between them."""
        return sum(end - begin for begin, end in self.spans) + max(0, len(self.spans) - 1)


@dataclass(frozen=True)
class NewItems:
    # Comma-separated JSON.
    items: Pieces = ()
    # A line per item: the position where it ends, and its id as JSON.
    index: bytes = b""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.items)) + len(self.index)


class ConversationStore(ABC):
    @abstractmethod
    async def add(self, head: ConversationHead, new: NewItems, expires_at: int) -> None:
        """Adds a conversation with these items. Raises StoreFull."""

    @abstractmethod
    async def head(self, conversation_id: ConversationId) -> ConversationHead | None: ...

    @abstractmethod
    def pieces(self, head: ConversationHead, begin: int, end: int) -> AsyncIterator[bytes]:
        """Yields the bytes of items between two positions, piece by piece. Raises ResponseGone if the conversation or
        its layout no longer exists."""

    @abstractmethod
    async def item_page(
        self, head: ConversationHead, after: bytes | None, limit: int, order: Order
    ) -> ItemPage | None:
        """See ResponseStore. Raises ResponseGone, also for another layout."""

    @abstractmethod
    async def item(self, head: ConversationHead, name: bytes) -> Span | None:
        """Returns the position of the first item with this id, given as JSON. Raises ResponseGone, also for another
        layout."""

    @abstractmethod
    async def put_state(self, head: ConversationHead, state: bytes) -> None:
        """Replaces the state. Does nothing if the conversation no longer exists. Raises StoreFull."""

    @abstractmethod
    async def append(
        self,
        head: ConversationHead,
        new: Sequence[NewItems],
        name: str,
        expires_at: int,
        max_items: int,
        max_bytes: int,
    ) -> bool:
        """Adds all items atomically. A repetition with the same `name` within minutes adds nothing. Returns False if
        the conversation no longer exists. Raises StoreFull, and ConversationFull if it would exceed `max_items` or
        `max_bytes`."""

    @abstractmethod
    async def delete_item(self, head: ConversationHead, name: bytes) -> None:
        """Deletes all items with this id, given as JSON. A reference has the id of its item."""

    @abstractmethod
    async def delete(self, head: ConversationHead) -> None: ...

    @abstractmethod
    async def drop_expired(self, now: float) -> None:
        """Deletes some expired conversations."""
