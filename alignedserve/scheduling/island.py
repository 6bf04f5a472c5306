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
    """The fields are explained at `router/request_state.py`."""

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
        """Seconds on the router's clock at which it entered its phase."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of its prompt and output."""

    @property
    def num_output(self) -> int: ...

    @property
    def num_cached(self) -> int:
        """The number of tokens whose KV the pool has."""

    @property
    def num_missing(self) -> int:
        """The number of tokens that a prefill instance would compute."""

    @property
    def num_reusable(self) -> int:
        """The number of tokens whose KV a prefill instance could take from the pool."""

    @property
    def num_blocks(self) -> int:
        """The number of its blocks in the pool, each of which has a whole column."""

    @property
    def expected_at(self) -> InstanceId | None:
        """The decode instance to which it was announced."""

    def demotion(self, now: float) -> int:
        """How many times its answer has lately outgrown its prediction."""


class Urgency(NamedTuple):
    """Where a request stands in its line: the smallest goes first."""

    # A request that was begun and interrupted holds blocks in the pool, so it goes before those which would need more.
    is_new: bool
    start_s: float
    # It goes behind the others if it has not begun by then.
    can_be_lost: bool


class Room(NamedTuple):
    """How much more may be started."""

    # The number of tokens to compute.
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

    def num_emptied(self, line: int) -> int:
        """Returns how often its last request has left it."""

    def is_refused(self, line: int) -> bool:
        """Whether the pool has refused blocks for a request of this line, and none were released since."""

    def first(self, line: int, now: float) -> RoutedRequest | None: ...

    def soonest(self, line: int, count: int, now: float) -> Sequence[tuple[RoutedRequest, float]]:
        """At most `count` requests that can still make their objectives, the most urgent first, each with its latest
        start."""

    def take(self, request: RoutedRequest) -> None:
        """Takes the request out of its line: it is started."""


class DecodeQueue(Protocol):
    """Requests that wait in the pool for a decode instance."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_changes(self) -> int:
        """The number of additions so far, and of other changes that give a search which found nothing a new chance."""

    @property
    def real_time(self) -> Collection[RoutedRequest]:
        """The real-time requests, the earliest first."""

    def soonest(self, count: int) -> Sequence[RoutedRequest]:
        """So many real-time requests, those that are due first."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[RoutedRequest]:
        """The requests, the earliest first."""


# ---- processes -------------------------------------------------------------------------------------------------------


class Work(Protocol):
    """The number of tokens to compute, by class."""

    @property
    def total(self) -> int: ...

    def sum(self, is_rt: bool) -> int: ...

    def count(self, is_rt: bool) -> int:
        """The number of requests."""


class PrefillView(Protocol):
    @property
    def instance_id(self) -> InstanceId: ...

    @property
    def hello(self) -> Hello: ...

    @property
    def pending(self) -> Work:
        """The work that it was given and has not computed."""

    @property
    def num_free_blocks(self) -> int: ...


class Search(Protocol):
    """A question to the pool. A search that found nothing is repeated when there is something new to find."""

    @property
    def is_asked(self) -> bool:
        """Whether the pool has not answered yet."""

    def is_due(self, about: object) -> bool: ...

    def ask(self, about: object) -> None: ...


class DecodeView(Protocol):
    """The fields are explained at `router/instance_views.py`."""

    @property
    def instance_id(self) -> InstanceId: ...

    @property
    def hello(self) -> Hello: ...

    @property
    def report(self) -> DecodeReport | None:
        """Its last report."""

    @property
    def batch(self) -> Mapping[RequestKey, int]:
        """Requests offered as the candidate batch and not admitted, with the blocks that they need."""

    @property
    def near(self) -> Mapping[RequestKey, int]:
        """Requests offered as candidate requests and not admitted, with the blocks that they need."""

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
        """The real-time requests that were announced to it."""

    @property
    def num_blocks(self) -> int: ...

    def blocks_of(self, request: RoutedRequest) -> int:
        """How many blocks there the request takes whose KV the pool has."""

    def blocks_to_run(self, request: RoutedRequest) -> int:
        """Likewise, with those for its next tokens."""

    @property
    def num_available_blocks(self) -> int: ...

    @property
    def num_available_slots(self) -> int: ...

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
        """Whether the same instances compute prompts and decode."""

    def prefill_s(self, num_cached: int, num_tokens: int) -> float:
        """How many seconds an instance takes for a prompt of which so many tokens are cached."""

    def decode_s(self, num_tokens: int) -> float:
        """How many seconds an instance takes between two tokens after so many."""


class Island(Protocol):
    """All of the island, as the router knows it."""

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
        """Tokens to compute of requests that were started, and wait for blocks of the pool."""

    @property
    def pinned(self) -> Collection[RequestKey]:
        """Best-effort requests that wait for prefill, and whose KV in the pool is not for others to take."""

    @property
    def num_be(self) -> int:
        """The number of best-effort requests that are under way."""

    def expected_output(self, request: RoutedRequest) -> int:
        """The number of tokens that its answer is expected to have in all."""

    def has_room_for(self, request: RoutedRequest, be_share: float, share: float) -> bool:
        """Whether the pool, with the memory of colocated instances, has blocks for a best-effort request at its
        expected length: best effort then needs at most `be_share` of them, or all that is under way at most `share`."""


# ---- what a policy decides -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assign:
    """Offers these requests, which wait in the pool, to a decode instance: as its candidate batch, or to join its
    running batch.

    Urgent requests take the shortest way: they are staged only where that waits for no other requests' copies.
    """

    decode: InstanceId
    requests: Sequence[RoutedRequest]
    is_batch: bool = False
    is_urgent: bool = False
