"""Stored responses and conversations. OpenAI's Responses API keeps a conversation for its next turn, and can answer in
the background.

A response has a small head, and parts of any size that are read in pieces when they are needed. A part never changes.

The holder of an unfinished response's lease works on it, as for a job (base.py). A response is over when its status is
in OVER. Then it does not change until it is deleted or expires. All methods raise StoreAway and may be repeated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NewType, Self

import msgspec

from alignedserve.store.deliveries import Delivery
from alignedserve.store.records import Lease, Leases, Order

ResponseId = NewType("ResponseId", str)

ConversationId = NewType("ConversationId", str)

ResponseStatus = Literal["queued", "completed", "incomplete", "failed", "cancelled"]
OVER = ("completed", "incomplete", "failed", "cancelled")

# `call`: The body of the call as JSON, until it is answered.
# `input_items`: Comma-separated JSON.
# `item_index`: A line per input item, with the position of its end and its id as JSON.
# `repeated`: A JSON object with the fields of the call that the response repeats.
# `output`: Items as comma-separated JSON.
# `places`: The positions of everything in the output.
Part = Literal["call", "input_items", "item_index", "repeated", "output", "places"]
PARTS: Final[tuple[Part, ...]] = ("call", "input_items", "item_index", "repeated", "output", "places")
# The positions where something begins and ends.
Span = tuple[int, int]
# The bytes of a part, in pieces.
Pieces = Sequence[bytes | bytearray | memoryview]


class ResponseHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: ResponseId
    # The owner (gateway/http/keys.py); "" if no keys are required.
    owner: str = ""
    status: ResponseStatus
    # Seconds since 1970.
    created_at: int
    expires_at: int
    # The previous response of the conversation.
    previous_id: ResponseId | None = None
    # The conversation object that it belongs to.
    conversation_id: ConversationId | None = None
    is_background: bool = False
    # Responses in the conversation up to and including this one.
    num_turns: int = 1
    # Size in bytes of the conversation before it.
    num_earlier_bytes: int = 0
    # Sizes in bytes of its parts, and of the log-probabilities in its output. A conversation does not include the
    # latter.
    num_bytes: dict[str, int] = {}
    num_logprob_bytes: int = 0
    # OpenAI's object as JSON, without the output and the fields repeated from the call.
    state: bytes

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    @property
    def num_conversation_bytes(self) -> int:
        """Size in bytes of the conversation up to and including this response and its output."""
        num_said = self.size_of("output") - self.num_logprob_bytes
        return self.num_earlier_bytes + self.size_of("input_items") + num_said

    def size_of(self, part: Part) -> int:
        return self.num_bytes.get(part, 0)


@dataclass(frozen=True)
class ItemPage:
    """A page of a response's input items, in order."""

    # Where each item begins and ends in the part.
    spans: list[Span]
    # JSON ids; None if there are no items. `last_id` is where the next page begins after. It includes the item's place
    # if other items have the same id.
    first_id: bytes | None
    last_id: bytes | None
    has_more: bool

    @classmethod
    def of(cls, found: Sequence[Any]) -> Self | None:
        """Returns the page that a script found (conversation_scripts.PAGE)."""
        if not found:
            return None
        spans = list(zip(found[3::3], found[4::3], strict=True))
        return cls(spans, found[2] if spans else None, found[1] if spans else None, found[0] == b"1")


@dataclass(frozen=True)
class Turn:
    """The items that an ended response adds to its conversation: its input items and its output."""

    conversation_id: ConversationId
    # A line per output item (see item_index), and the ranges of these in the output, without log-probabilities.
    output_index: bytes
    output_spans: Sequence[Span]
    # When the conversation then expires.
    expires_at: int
    # The most items, and bytes of items, that the conversation may have after it.
    max_items: int
    max_bytes: int


class ResponseGone(Exception):
    """The response or conversation was deleted, or changed its layout, while it was read."""


class ConversationFull(Exception):
    """The conversation would have too many items or too many bytes."""


def sizes_of(parts: Mapping[Part, Pieces]) -> dict[str, int]:
    return {name: sum(map(len, pieces)) for name, pieces in parts.items()}


class ResponseStore(Leases):
    @property
    @abstractmethod
    def conversations(self) -> ConversationStore:
        """Returns the store of conversations, which has the same limits."""

    @abstractmethod
    async def add(self, head: ResponseHead, parts: Mapping[Part, Pieces], turn: Turn | None = None) -> None:
        """Adds the response, and atomically its `turn` to the conversation if that still exists. Raises StoreFull,
        ConversationFull, and TooManyJobs if the response is open and the limit is reached."""

    @abstractmethod
    async def head(self, response_id: ResponseId) -> ResponseHead | None: ...

    @abstractmethod
    def pieces(
        self, head: ResponseHead, part: Part, begin: int = 0, end: int | None = None
    ) -> AsyncIterator[bytes]:
        """Yields the bytes of a part, or those between two positions, piece by piece. Raises ResponseGone."""

    @abstractmethod
    async def item_page(
        self, response_id: ResponseId, after: bytes | None, limit: int, order: Order
    ) -> ItemPage | None:
        """Returns a page of input items, or None if there is no item `after`. `after` is an item's id as JSON, or the
        `last_id` of a page. Raises ResponseGone."""

    @abstractmethod
    async def items(self, response_id: ResponseId, names: Sequence[bytes]) -> list[Span | None]:
        """Returns for each id, given as JSON, the position of the first input item with it. Raises ResponseGone."""

    @abstractmethod
    async def replace(
        self,
        old: ResponseHead,
        new: ResponseHead,
        lease: Lease | None,
        deliveries: Sequence[Delivery] = (),
        parts: Mapping[Part, Pieces] | None = None,
        turn: Turn | None = None,
    ) -> bool:
        """Atomically replaces the head, stores `deliveries` and new `parts`, and adds the `turn` to its conversation if
        that still exists. Returns False if the head is not `old` any more. The holder passes its `lease` (raises
        LeaseLost if that was lost); other callers pass None. If the response is over after this, its lease and its call
        are deleted. Raises ConversationFull, and StoreFull if there is no room for `parts`. Without parts it never
        does, so a response can always end."""

    @abstractmethod
    async def delete(self, head: ResponseHead) -> None: ...

    @abstractmethod
    async def expired(self, now: float) -> list[ResponseHead]:
        """Returns some expired responses."""

    @abstractmethod
    async def take(self, holder: str, seconds: float, count: int, max_of_owner: int) -> list[Lease]:
        """Takes the leases of at most `count` open responses without a holder. Owners take turns, the one with the
        oldest last turn first; within an owner, the oldest response is first. `holder` names one process. It holds at
        most `max_of_owner` responses per owner, but any number of owner ""."""

    @abstractmethod
    async def begin(self, lease: Lease) -> int:
        """Records that the response begins. Returns how often it had begun when another holder took it without a
        release by the one before: the response may have killed that gateway. Raises LeaseLost."""


# ---- conversations ---------------------------------------------------------------------------------------------------

# Calls, and responses when they end, add items to a conversation.
#
# The items are one part, which is read in pieces: comma-separated JSON. New items are appended. A deleted item leaves a
# gap. When there are many gaps, the part is rewritten, with another layout. Positions apply to one layout.


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
    async def items(self, head: ConversationHead, names: Sequence[bytes]) -> list[Span | None]:
        """See ResponseStore. Raises ResponseGone, also for another layout."""

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
