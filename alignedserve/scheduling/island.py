"""A policy's view of the island, in the router: requests, and the processes that serve them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from alignedserve.protocol.messages import DecodeReport, Hello
from alignedserve.scheduling.views import RequestView
from alignedserve.types import InstanceId, RequestKey

# ---- requests --------------------------------------------------------------------------------------------------------


class RoutedRequest(RequestView, Protocol):
    """The fields are explained at `router/requests.py`."""

    @property
    def owner(self) -> str:
        """The owner of its API key. The queues give owners turns, so policies need not look at it."""

    @property
    def arrived_s(self) -> float: ...

    @property
    def since_s(self) -> float:
        """When it entered its phase: seconds on the router's clock."""

    @property
    def num_cached(self) -> int:
        """The number of tokens with KV in the pool."""

    @property
    def num_found(self) -> int:
        """The number of those that other requests had left."""

    @property
    def num_missing(self) -> int:
        """The number of tokens that a prefill instance would compute."""

    @property
    def num_reusable(self) -> int:
        """The number of tokens with KV that a prefill instance could load from the pool."""

    @property
    def expected_at(self) -> InstanceId | None:
        """The decode instance to which it was announced."""

    @property
    def may_share(self) -> bool:
        """Whether it may have KV in common with requests that begin alike."""

    def block_hashes(self, block_size: int) -> list[bytes]:
        """Returns the hashes of its prompt's full blocks."""

    def demotion(self, now: float) -> int:
        """Returns how often its answer has recently exceeded its prediction."""


class Urgency(NamedTuple):
    """A request's place in its line: the smallest goes first."""

    # A request that has begun and was interrupted holds blocks in the pool. It goes before those that would need new
    # ones.
    is_new: bool
    start_s: float
    # Whether it goes behind the others if it has not begun by `start_s`.
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
    """Requests that wait for prefill, in one line or several. If those of several owners wait in a line, its methods
    return requests of the owner that has the turn."""

    @property
    def owners_compete(self) -> bool:
        """Whether several owners have open requests."""

    def is_empty(self, line: int) -> bool: ...

    def num_emptied(self, line: int) -> int:
        """Returns how often its last request has left it."""

    def is_refused(self, line: int) -> bool:
        """Returns whether none of this line may ask the pool for blocks now: it has refused one and released none
        since, or as many as it may still have room for are asking."""

    def first(self, line: int, now: float) -> RoutedRequest | None: ...

    def soonest(self, line: int, count: int, now: float) -> Sequence[tuple[RoutedRequest, float]]:
        """Returns at most `count` requests that can still meet their objectives, the most urgent first, each with its
        latest start."""

    def take(self, request: RoutedRequest) -> None:
        """Removes the request from its line, because it is started."""


class DecodeQueue(Protocol):
    """Requests that wait in the pool for a decode instance: all best effort, and real time. If real time of several
    owners waits, it holds only that of the owner that has the turn."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_changes(self) -> int:
        """Counts additions, and all other changes after which an unsuccessful search may succeed."""

    @property
    def real_time(self) -> Collection[RoutedRequest]:
        """The real-time requests, in order of arrival."""

    def soonest(self, count: int, now: float) -> Sequence[RoutedRequest]:
        """Returns at most `count` real-time requests, those due first in front. Lost ones follow, the oldest first, and
        at least one of them. If none in time has an objective, all are in the order in which they are lost."""

    def lost_from(self, when: float, has_objective: bool = False) -> Iterator[RoutedRequest]:
        """Yields the real-time requests that are lost at `when` or later, in that order. `has_objective`: only those
        with an objective between tokens."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[RoutedRequest]:
        """Yields the requests in order of arrival."""


# ---- processes -------------------------------------------------------------------------------------------------------


class TokensByClass(Protocol):
    """The number of tokens to compute, by class."""

    @property
    def total(self) -> int: ...

    def sum(self, is_rt: bool) -> int: ...

    def count(self, is_rt: bool) -> int:
        """Returns the number of requests."""


class PrefillView(Protocol):
    @property
    def instance_id(self) -> InstanceId: ...

    @property
    def hello(self) -> Hello: ...

    @property
    def pending(self) -> TokensByClass:
        """The work that it was given and has not computed."""

    @property
    def num_free_blocks(self) -> int: ...


class Search(Protocol):
    """A query to the pool. An unsuccessful one is repeated when there is something new to find."""

    @property
    def is_asked(self) -> bool:
        """Whether the pool has not answered yet."""

    def is_due(self, about: object) -> bool: ...

    def ask(self, about: object) -> None: ...


class DecodeView(Protocol):
    """The fields are explained at `router/views.py`."""

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
        """Returns how many of its blocks a request takes when its KV is loaded from the pool, beside those that others
        have there."""

    def blocks_to_run(self, request: RoutedRequest) -> int:
        """Returns the same, plus the blocks for its next tokens."""

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

    @property
    def second_token_s(self) -> float:
        """The seconds from the first token to the second, on average over recent real time."""

    def prefill_s(self, num_cached: int, num_tokens: int) -> float:
        """Returns the seconds that an instance takes for a prompt with `num_cached` cached tokens."""

    def decode_s(self, num_tokens: int) -> float:
        """Returns the seconds between two tokens of a request of this length."""


class Island(Protocol):
    """The whole island, as the router knows it."""

    @property
    def now(self) -> float: ...

    @property
    def cluster(self) -> ClusterState: ...

    @property
    def prefill_queue(self) -> PrefillQueue: ...

    @property
    def decode_queue(self) -> DecodeQueue: ...

    @property
    def reserving(self) -> TokensByClass:
        """Tokens to compute of requests that have started and wait for pool blocks."""

    @property
    def pinned(self) -> Collection[RoutedRequest]:
        """Best-effort requests that wait for prefill, with KV in the pool that other requests may not take."""

    @property
    def num_be(self) -> int:
        """The number of running best-effort requests."""

    @property
    def common_share(self) -> float:
        """The share of the running requests' KV that others of them have as well."""

    def expected_output(self, request: RoutedRequest) -> int:
        """Returns the number of tokens that its answer is expected to have in all."""

    def num_known(self, request: RoutedRequest) -> int:
        """Returns how many of its prompt's tokens the prefix cache of an instance may hold, at most."""

    def has_room_for(self, request: RoutedRequest, be_share: float, share: float) -> bool:
        """Returns whether a best-effort request of the expected length fits into the pool and the memory of instances
        that decode. It fits if best effort then needs at most `be_share` of their blocks, or all running requests at
        most `share`."""


# ---- what a policy decides -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assign:
    """Offers these requests, which wait in the pool, to a decode instance, as its candidate batch or to join the
    running batch.

    Urgent requests take the shortest way: they are staged only if they need not wait for copies of other requests.
    """

    decode: InstanceId
    requests: Sequence[RoutedRequest]
    is_batch: bool = False
    is_urgent: bool = False
