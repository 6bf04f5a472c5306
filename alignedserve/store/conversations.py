"""The conversations that are stored, as OpenAI's API has them: items that calls, and responses which have ended, are
added to.

Items are bytes of one part, JSON with commas between them, which is read in pieces. They are added at its end; an item
that is deleted leaves a gap there, and when there are many gaps the part is written anew, with another layout. Places
in it are those of one layout. All methods raise StoreAway, and may be repeated.
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
    # The owner (gateway/http/keys.py); "" where no keys are needed.
    owner: str
    # Seconds since 1970.
    created_at: int
    # OpenAI's object as JSON.
    state: bytes
    # The number of times that its items were written anew.
    layout: int = 0
    num_items: int = 0
    # Where items are in the part: within each span there are commas between them.
    spans: Sequence[Span] = ()

    @property
    def num_bytes(self) -> int:
        """Returns the size in bytes of all items, and of the commas between them."""
        return sum(end - begin for begin, end in self.spans) + max(0, len(self.spans) - 1)


@dataclass(frozen=True)
class NewItems:
    # JSON with commas between them.
    items: Pieces = ()
    # A line for each of them: where it ends in the bytes of these, and its id as JSON.
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
        """Yields the bytes of items between two places, some at a time. Raises ResponseGone if the conversation, or
        its layout, is not there any more."""

    @abstractmethod
    async def item_page(
        self, head: ConversationHead, after: bytes | None, limit: int, order: Order
    ) -> ItemPage | None:
        """See ResponseStore. Raises ResponseGone, also for another layout."""

    @abstractmethod
    async def item(self, head: ConversationHead, name: bytes) -> Span | None:
        """Returns where the first item with this id is, which is JSON. Raises ResponseGone, also for another layout."""

    @abstractmethod
    async def put_state(self, head: ConversationHead, state: bytes) -> None:
        """Raises StoreFull. Does nothing if the conversation is not there any more."""

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
        """Adds all of them together, and does not add them again by the same `name` in the next minutes. Returns False
        if the conversation is not there any more. Raises StoreFull, and ConversationFull if it would have more items,
        or more bytes of them."""

    @abstractmethod
    async def delete_item(self, head: ConversationHead, name: bytes) -> None:
        """Deletes all items with this id, which is JSON: references have that of their item."""

    @abstractmethod
    async def delete(self, head: ConversationHead) -> None: ...

    @abstractmethod
    async def drop_expired(self, now: float) -> None:
        """Deletes some of the conversations that have expired."""
