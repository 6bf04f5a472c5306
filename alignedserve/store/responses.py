"""The responses that are stored: OpenAI's Responses keep a conversation for its next turn, and a response may be
answered in the background.

A response has a head, which is small, and parts of any size, which are read in pieces, by whoever needs them. A part
never changes once it is there.

A response that is not over is worked on by the holder of its lease, as a job is (base.py). It is over when its status
is one of OVER, and stays as it is from then on, until it is deleted or expires. All methods raise StoreAway, and may
be repeated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NewType, Self

import msgspec

from alignedserve.store.base import Lease, LeaseState, Order
from alignedserve.store.deliveries import Delivery

if TYPE_CHECKING:
    from alignedserve.store.conversations import ConversationStore

ResponseId = NewType("ResponseId", str)

ConversationId = NewType("ConversationId", str)

ResponseStatus = Literal["queued", "completed", "incomplete", "failed", "cancelled"]
OVER = ("completed", "incomplete", "failed", "cancelled")

# call: the body of the call, as JSON, as long as it is not answered. input_items: JSON with commas between them.
# item_index: a line for each of these, with the place where it ends and its id as JSON. repeated: a JSON object, what
# the response repeats of its call. output: items as JSON with commas between them. places: where everything is in the
# output.
Part = Literal["call", "input_items", "item_index", "repeated", "output", "places"]
PARTS: Final[tuple[Part, ...]] = ("call", "input_items", "item_index", "repeated", "output", "places")
# A place where something begins, and the one where it ends.
Span = tuple[int, int]
# A part, in pieces.
Pieces = Sequence[bytes | bytearray | memoryview]


class ResponseHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: ResponseId
    # The owner (gateway/http/keys.py); "" where no keys are needed.
    owner: str = ""
    status: ResponseStatus
    # Seconds since 1970.
    created_at: int
    expires_at: int
    # The response before it: its conversation goes on here.
    previous_id: ResponseId | None = None
    # The conversation that it belongs to (conversations.py).
    conversation_id: ConversationId | None = None
    is_background: bool = False
    # The number of responses in the conversation up to this one, which counts too.
    num_turns: int = 1
    # The size in bytes of the conversation before it.
    num_earlier_bytes: int = 0
    # The sizes in bytes of its parts, and of the log-probabilities in its output, which are no part of a conversation.
    num_bytes: dict[str, int] = {}
    num_logprob_bytes: int = 0
    # OpenAI's object as JSON, without its output and what it repeats of the call.
    state: bytes

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    @property
    def num_conversation_bytes(self) -> int:
        """Returns the size in bytes of the conversation up to this response, its output included."""
        num_said = self.size_of("output") - self.num_logprob_bytes
        return self.num_earlier_bytes + self.size_of("input_items") + num_said

    def size_of(self, part: Part) -> int:
        return self.num_bytes.get(part, 0)


@dataclass(frozen=True)
class ItemPage:
    """Some of a response's input items, in order."""

    # Where each begins and ends in the part.
    spans: list[Span]
    # The first one's id, and after what the next page begins: the last one's id, with its place if others have the
    # same id. As JSON; None: there are none.
    first_id: bytes | None
    last_id: bytes | None
    has_more: bool

    @classmethod
    def of(cls, found: Sequence[Any]) -> Self | None:
        """Returns the page that a script has found (conversation_scripts.PAGE)."""
        if not found:
            return None
        spans = list(zip(found[3::3], found[4::3], strict=True))
        return cls(spans, found[2] if spans else None, found[1] if spans else None, found[0] == b"1")


@dataclass(frozen=True)
class Turn:
    """The addition of a response which has ended to its conversation: its input items, and those of its output."""

    conversation_id: ConversationId
    # A line for each item of the output, and where these are in the output: without log-probabilities. See item_index.
    output_index: bytes
    output_spans: Sequence[Span]
    # When the conversation expires after it.
    expires_at: int
    # The most items that the conversation may have after it, and the most bytes of them.
    max_items: int
    max_bytes: int


class ResponseGone(Exception):
    """The response or the conversation was deleted, or changed its layout, while it was read."""


class ConversationFull(Exception):
    """A conversation would have too many items, or too many bytes of them."""


def sizes_of(parts: Mapping[Part, Pieces]) -> dict[str, int]:
    return {name: sum(map(len, pieces)) for name, pieces in parts.items()}


class ResponseStore(ABC):
    @property
    @abstractmethod
    def conversations(self) -> ConversationStore:
        """Returns the store of conversations, which has the same limits."""

    @abstractmethod
    async def add(self, head: ResponseHead, parts: Mapping[Part, Pieces], turn: Turn | None = None) -> None:
        """Adds the `turn` to its conversation in the same step, if that is still there. Raises StoreFull,
        ConversationFull, and TooManyJobs if it is not over and there are as many of those as there may be."""

    @abstractmethod
    async def head(self, response_id: ResponseId) -> ResponseHead | None: ...

    @abstractmethod
    def pieces(
        self, head: ResponseHead, part: Part, begin: int = 0, end: int | None = None
    ) -> AsyncIterator[bytes]:
        """Yields the bytes of a part, or those between two places, some at a time. Raises ResponseGone."""

    @abstractmethod
    async def item_page(
        self, response_id: ResponseId, after: bytes | None, limit: int, order: Order
    ) -> ItemPage | None:
        """`after` is the id of an item, as JSON, or the `last_id` of a page. Returns None if there is no such item.
        Raises ResponseGone."""

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
        """Replaces the head, stores `deliveries` and new `parts`, and adds the `turn` to its conversation, if that is
        still there, in the same step; returns False if the head is not `old` any more. `lease` is the holder's
        (LeaseLost is raised if it was lost); None for other callers. When the response is over after this, its lease
        and its call are deleted. Raises ConversationFull, and StoreFull if there is no room for `parts`; without any it
        never does, so that a response can always end."""

    @abstractmethod
    async def delete(self, head: ResponseHead) -> None: ...

    @abstractmethod
    async def expired(self, now: float) -> list[ResponseHead]:
        """Returns some of the responses that have expired."""

    @abstractmethod
    async def take(self, holder: str, seconds: float, count: int, max_of_owner: int) -> list[Lease]:
        """Takes the leases of at most `count` responses which are not over and which nobody holds: by owner in turn,
        the owner first that had its last turn longest ago, and of an owner the oldest first. `holder` is the
        name of one process, which has leases of at most `max_of_owner` responses of an owner; of "" it has any
        number."""

    @abstractmethod
    async def renew(self, leases: Sequence[Lease], seconds: float) -> list[LeaseState]: ...

    @abstractmethod
    async def release(self, lease: Lease) -> None: ...

    @abstractmethod
    async def begin(self, lease: Lease) -> int:
        """Records that the response begins. Returns how often it had begun when another holder took it without a
        release by the one before: the response may have killed that gateway. Raises LeaseLost."""
