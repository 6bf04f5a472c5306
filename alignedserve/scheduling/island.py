"""What a policy sees of the island, in the router: requests, and the processes that serve them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from alignedserve.protocol.messages import DecodeReport, Hello
from alignedserve.timing.deadlines import Deadlines
from alignedserve.types import InstanceId, RequestKey

# ---- requests --------------------------------------------------------------------------------------------------------


class RoutedRequest(Protocol):
    """See `router/request_state.py` for more about each field."""

    @property
    def key(self) -> RequestKey: ...

    @property
    def is_rt(self) -> bool: ...

    @property
    def deadlines(self) -> Deadlines: ...

    @property
    def arrived_s(self) -> float: ...

    @property
    def since_s(self) -> float:
        """When it came into its state."""

    @property
    def num_tokens(self) -> int:
        """Of prompt and output."""

    @property
    def num_output(self) -> int: ...

    @property
    def num_cached(self) -> int:
        """Tokens whose KV the pool has."""

    @property
    def num_missing(self) -> int:
        """Tokens that a prefill instance would compute."""

    @property
    def num_reusable(self) -> int:
        """Tokens whose KV a prefill instance could take from the pool."""

    @property
    def num_blocks(self) -> int:
        """Of the pool."""

    @property
    def expected_at(self) -> InstanceId | None:
        """The decode instance that was told to expect it."""

    def demotion(self, now: float) -> int:
        """How many times its answer has outgrown its prediction, of late."""


class Urgency(NamedTuple):
    """Where a request stands in its line: the least goes first."""

    # one that was begun and interrupted holds room in the pool: it goes before those that would want more
    is_new: bool
    start_s: float
    # it moves back when it has not begun by then
    can_be_lost: bool


class Room(NamedTuple):
    """For what is started."""

    # of work
    num_tokens: int
    num_requests: int

    def less(self, num_tokens: int, num_requests: int) -> Room:
        return Room(self.num_tokens - num_tokens, self.num_requests - num_requests)

    @property
    def is_there(self) -> bool:
        return self.num_tokens > 0 and self.num_requests > 0


class PrefillQueue(Protocol):
    """Requests that wait for prefill, in one line or several."""

    def is_empty(self, line: int) -> bool: ...

    def is_refused(self, line: int) -> bool:
        """Its first request found no room in the pool."""

    def first(self, line: int, now: float) -> RoutedRequest | None: ...

    def take(self, request: RoutedRequest) -> None:
        """It is started."""


class DecodeQueue(Protocol):
    """Requests that wait in the pool for a decode instance."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_changes(self) -> int:
        """Additions so far, and whatever else gives a search that found nothing a new chance."""

    @property
    def real_time(self) -> Collection[RoutedRequest]:
        """Those that came first first."""

    def soonest(self, count: int) -> Sequence[RoutedRequest]:
        """Of real time, so many that are due first."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[RoutedRequest]:
        """Those that came first first."""


# ---- processes -------------------------------------------------------------------------------------------------------


class Work(Protocol):
    """Tokens to compute, by class."""

    @property
    def total(self) -> int: ...

    def sum(self, is_rt: bool) -> int: ...

    def count(self, is_rt: bool) -> int:
        """Of requests."""


class PrefillView(Protocol):
    @property
    def instance_id(self) -> InstanceId: ...

    @property
    def hello(self) -> Hello: ...

    @property
    def pending(self) -> Work:
        """That it was given and has not computed."""

    @property
    def num_free_blocks(self) -> int: ...


class Search(Protocol):
    """A question to the pool. What found nothing is asked again when there is something new to find."""

    def is_due(self, about: object) -> bool: ...

    def ask(self, about: object) -> None: ...


class DecodeView(Protocol):
    """See `router/cluster.py` for more about each field."""

    @property
    def instance_id(self) -> InstanceId: ...

    @property
    def hello(self) -> Hello: ...

    @property
    def report(self) -> DecodeReport | None:
        """Its last one."""

    @property
    def batch(self) -> Mapping[RequestKey, int]:
        """Offered as the batch to run next, and not admitted; with blocks needed."""

    @property
    def near(self) -> Mapping[RequestKey, int]:
        """Offered to join the running batch, likewise."""

    @property
    def batch_since_s(self) -> float: ...

    @property
    def batch_search(self) -> Search: ...

    @property
    def near_search(self) -> Search: ...

    @property
    def running(self) -> Collection[RequestKey]: ...

    @property
    def be_running(self) -> Collection[RequestKey]: ...

    @property
    def be_promised(self) -> Collection[RequestKey]: ...

    @property
    def coming(self) -> Collection[RequestKey]:
        """Real time that it was told to expect."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_unspoken_blocks(self) -> int: ...

    @property
    def num_unspoken_slots(self) -> int: ...

    @property
    def num_blocks_for_rt(self) -> int: ...

    @property
    def num_slots_for_rt(self) -> int: ...

    @property
    def num_rt(self) -> int: ...


class ClusterState(Protocol):
    @property
    def prefills(self) -> Sequence[PrefillView]: ...

    @property
    def decodes(self) -> Sequence[DecodeView]: ...

    @property
    def is_colocated(self) -> bool:
        """The same instances compute prompts and decode."""

    def prefill_s(self, num_cached: int, num_tokens: int) -> float:
        """What an instance takes for a prompt of which so much is there."""

    def decode_s(self, num_tokens: int) -> float:
        """Likewise between two tokens after so many."""


class Island(Protocol):
    """All of it, as the router knows it."""

    @property
    def now(self) -> float: ...

    @property
    def cluster(self) -> ClusterState: ...

    @property
    def prefill_queue(self) -> PrefillQueue: ...

    @property
    def decode_queue(self) -> DecodeQueue: ...

    @property
    def reserving(self) -> Work:
        """Of those that were started, and wait for blocks of the pool."""

    @property
    def pinned(self) -> Collection[RequestKey]:
        """Best-effort prompts that were begun, and wait with what the pool has of them."""

    @property
    def num_be(self) -> int:
        """Best-effort requests that are under way."""

    def expected_output(self, request: RoutedRequest) -> int:
        """Tokens that its answer will have in all, as far as is known."""

    def has_room_for(self, request: RoutedRequest, be_share: float, share: float) -> bool:
        """In the pool, for a best-effort request at the length that it is expected to get: best effort needs at most so
        much of it, or all that is under way at most so much."""


# ---- what a policy says ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assign:
    """Offer these, which wait in the pool, to a decode instance: as its next batch, or to join the one that runs.

    Urgent ones take the shortest way, and wait for no others' copies.
    """

    decode: InstanceId
    requests: Sequence[RoutedRequest]
    is_batch: bool = False
    is_urgent: bool = False
