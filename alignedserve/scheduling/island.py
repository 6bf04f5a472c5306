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
        """The number of its tokens, of prompt and output."""

    @property
    def num_output(self) -> int: ...

    @property
    def num_cached(self) -> int:
        """The number of its first tokens whose KV the pool has."""

    @property
    def num_missing(self) -> int:
        """The number of tokens that a prefill instance would compute."""

    @property
    def num_reusable(self) -> int:
        """The number of tokens whose KV a prefill instance could take from the pool."""

    @property
    def num_blocks(self) -> int:
        """The number of its pool blocks."""

    @property
    def expected_at(self) -> InstanceId | None:
        """The decode instance that was told to expect it."""

    def demotion(self, now: float) -> int:
        """How often its answer has exceeded its predicted length, less what was forgiven by `now`."""


class Urgency(NamedTuple):
    """Where a request stands in its line: the request with the least goes first."""

    # False for a request that was begun and interrupted: it has room in the pool, and goes before those that want more
    is_new: bool
    start_s: float
    # whether the request moves back if it has not begun at `start_s`
    can_be_lost: bool


class Room(NamedTuple):
    """How much may be started: tokens to compute, and requests."""

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
        """Whether the pool had no room for the line's first request."""

    def first(self, line: int, now: float) -> RoutedRequest | None: ...

    def take(self, request: RoutedRequest) -> None:
        """The request is started, and leaves its line."""


class DecodeQueue(Protocol):
    """Requests that wait in the pool for a decode instance."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_changes(self) -> int:
        """The number of additions, and of whatever else gives a search that found nothing a new chance."""

    @property
    def real_time(self) -> Collection[RoutedRequest]:
        """Real-time requests in the order in which they came."""

    def soonest(self, count: int) -> Sequence[RoutedRequest]:
        """Returns the `count` real-time requests whose next tokens are due first."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[RoutedRequest]:
        """Requests in the order in which they came."""


# ---- processes -------------------------------------------------------------------------------------------------------


class Work(Protocol):
    """Tokens to compute, by class."""

    @property
    def total(self) -> int: ...

    def sum(self, is_rt: bool) -> int: ...

    def count(self, is_rt: bool) -> int:
        """The number of requests of the class."""


class PrefillView(Protocol):
    @property
    def instance_id(self) -> InstanceId: ...

    @property
    def hello(self) -> Hello: ...

    @property
    def pending(self) -> Work:
        """Tokens of the prompts that it was given, as far as it has not computed them."""

    @property
    def num_free_blocks(self) -> int: ...


class Search(Protocol):
    """A question to the pool. One that found nothing is asked again when there is something new to find."""

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
        """The blocks that each request needs which was offered as the candidate batch and is not admitted."""

    @property
    def near(self) -> Mapping[RequestKey, int]:
        """The same for requests that were offered to join the running batch."""

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
        """Real-time requests that it was told to expect."""

    @property
    def num_blocks(self) -> int: ...

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
        """Seconds that an instance takes for the rest of a prompt if `num_cached` tokens are there."""

    def decode_s(self, num_tokens: int) -> float:
        """Seconds that an instance takes for the next token, after so many."""


class Island(Protocol):
    """The island, as the router knows it."""

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
        """Returns how many tokens the answer is expected to have at its end."""

    def has_room_for(self, request: RoutedRequest, be_share: float, share: float) -> bool:
        """Whether the pool will have room for a best-effort request at the length that it is expected to get: with it,
        best effort needs at most `be_share` of the pool, or all that is under way at most `share` of it."""


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
