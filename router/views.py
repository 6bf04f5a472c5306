"""What the router knows of instances. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from alignedserve.protocol.messages import AnnounceRt, DecodeReport, Hello
from alignedserve.router.prefix_counts import PrefixCounts, Run
from alignedserve.scheduling.island import RoutedRequest
from alignedserve.scheduling.prefixes import PrefixAffinity
from alignedserve.types import InstanceId, RequestKey

# ---- counts ----------------------------------------------------------------------------------------------------------


class TokenCounts:
    """Token counts per request, with sums per class, of all owners and of each. Pure.

    The sums are read at each event, so reading them must take as long for one request as for thousands."""

    def __init__(self) -> None:
        # (tokens, whether the request is real time, its owner) of each request
        self._tokens: dict[RequestKey, tuple[int, bool, str]] = {}
        # By class and owner. None: all owners.
        self._counts = Counter[tuple[bool, str | None]]()
        self._sums = Counter[tuple[bool, str | None]]()

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._tokens)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._tokens

    def put(self, key: RequestKey, num_tokens: int, is_rt: bool, owner: str) -> None:
        """Counts the request with `num_tokens` from now on, whatever it counted before."""
        self.discard(key)
        self._tokens[key] = num_tokens, is_rt, owner
        for whose in (None, owner):
            self._counts[is_rt, whose] += 1
            self._sums[is_rt, whose] += num_tokens

    def discard(self, key: RequestKey) -> None:
        """Safe to repeat."""
        if found := self._tokens.pop(key, None):
            num_tokens, is_rt, owner = found
            for whose in (None, owner):
                self._counts[is_rt, whose] -= 1
                self._sums[is_rt, whose] -= num_tokens
            if not self._counts[is_rt, owner]:
                del self._counts[is_rt, owner], self._sums[is_rt, owner]

    def count(self, is_rt: bool, owner: str | None = None) -> int:
        """Returns the number of requests of the class. `owner`: counts only this owner's."""
        return self._counts[is_rt, owner]

    def sum(self, is_rt: bool, owner: str | None = None) -> int:
        """Returns the number of tokens of the class. `owner`: counts only this owner's."""
        return self._sums[is_rt, owner]

    @property
    def total(self) -> int:
        return self.sum(True) + self.sum(False)

    @property
    def owners(self) -> set[str]:
        return {owner for _, owner in self._counts if owner is not None}


# ---- common prefixes -------------------------------------------------------------------------------------------------


# Sets of the requests of an instance: see `PrefixCounts`. Those that run there, and those with offered real time.
_RUNNING, _WITHOUT_OFFERED_BE = 1, 2


class SharedPrefixes:
    """The blocks that requests which an instance has, or was offered, have in common there."""

    def __init__(self) -> None:
        self._counts = PrefixCounts(num_sets=3)
        self._counted: dict[RequestKey, tuple[Run | None, tuple[int, ...]]] = {}

    def put(self, request: RoutedRequest, hashes: Sequence[bytes], is_running: bool) -> None:
        """Counts the request, with the hashes of the blocks that it may have in common, whatever it counted before."""
        self.discard(request.key)
        if hashes:
            sets: tuple[int, ...] = (0, _WITHOUT_OFFERED_BE) if request.is_rt else (0,)
            sets = (0, _RUNNING, _WITHOUT_OFFERED_BE) if is_running else sets
            self._counted[request.key] = self._counts.add(hashes, sets), sets

    def discard(self, key: RequestKey) -> None:
        """Safe to repeat."""
        if found := self._counted.pop(key, None):
            self._counts.discard(*found)

    def num_found(self, hashes: Sequence[bytes]) -> int:
        """Returns how many of these blocks others have or will have."""
        return self._counts.num_found(hashes)

    @property
    def num_offered(self) -> int:
        """The blocks that offered requests will have and running ones lack."""
        return self._counts.num_blocks[0] - self._counts.num_blocks[_RUNNING]

    @property
    def num_be(self) -> int:
        """Those of them that only best effort will have."""
        return self._counts.num_blocks[0] - self._counts.num_blocks[_WITHOUT_OFFERED_BE]


# ---- views -----------------------------------------------------------------------------------------------------------

# The router's view of each process of an island: its Hello, and counts of what it has.


@dataclass(eq=False, slots=True)
class Process:
    hello: Hello
    num_free_blocks: int = 0
    # An instance's recent ratio of measured to predicted iteration time.
    pace: float = 1.0
    # Whether an instance gets no new requests because it is about to take another role: see `role_change.py`.
    is_draining: bool = False

    @property
    def instance_id(self) -> InstanceId:
        return self.hello.instance_id


@dataclass(eq=False, slots=True)
class AssignedPrompts:
    """The prompts that were assigned to an instance."""

    # Tokens of each prompt that the instance has not computed.
    pending: TokenCounts
    prefix_affinity: PrefixAffinity


def _no_prompts(process: Process) -> AssignedPrompts:
    return AssignedPrompts(TokenCounts(), PrefixAffinity(process.hello.limits.num_kv_tokens))


@dataclass(eq=False, slots=True)
class PrefillView(Process):
    prompts: AssignedPrompts = field(init=False)
    # Staging blocks of each request that the instance was told to stage.
    staging: dict[RequestKey, int] = field(default_factory=dict)
    # Blocks of each request that a decode instance will pull from where its prompt was computed.
    held: dict[RequestKey, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompts = _no_prompts(self)

    @property
    def pending(self) -> TokenCounts:
        return self.prompts.pending

    @property
    def num_free_staging_blocks(self) -> int:
        num_taken = sum(self.staging.values()) + sum(self.held.values())
        return self.hello.limits.num_staging_blocks - num_taken

    def is_pulled(self, key: RequestKey | None) -> bool:
        """Returns whether a decode instance will pull the request from this instance."""
        return key in self.staging or key in self.held

    def discard(self, key: RequestKey) -> bool:
        """Removes a request that no decode instance will pull from this instance any more. Returns whether it was
        staged."""
        self.held.pop(key, None)
        return self.staging.pop(key, None) is not None

    def blocks_to_stage(self, request: RoutedRequest) -> int:
        return self.hello.limits.span.num_held(request.num_cached, request.num_cached)

    def has_room_at_once(self, num_blocks: int) -> bool:
        """Returns whether this many blocks can be staged at once, without waiting for others."""
        return not self.staging and num_blocks <= min(self.num_free_blocks, self.num_free_staging_blocks)


@dataclass(eq=False, slots=True)
class Search:
    """A query to the pool. An unsuccessful one is repeated when there is something new to find."""

    is_asked: bool = False
    # The state that the last query asked about, and the state of the last unsuccessful one.
    _asked_about: object = None
    _fruitless: object = None

    def is_due(self, about: object) -> bool:
        return not self.is_asked and self._fruitless != about

    def ask(self, about: object) -> None:
        self.is_asked, self._asked_about = True, about

    def answered(self, has_found: bool) -> None:
        self.is_asked = False
        self._fruitless = None if has_found else self._asked_about


@dataclass(eq=False, slots=True)
class DecodeView(Process):
    # ---- its last report ----
    report: DecodeReport | None = None
    # When it last reported a token, or one of its victims was dropped: seconds on the router's clock.
    progress_s: float = 0.0

    # ---- requests that it was offered and has not admitted, with the blocks that each needs for itself ----
    # The candidate batch.
    batch: dict[RequestKey, int] = field(default_factory=dict)
    # Candidate requests, and others that join the running batch.
    near: dict[RequestKey, int] = field(default_factory=dict)
    # The best-effort requests of both, with their blocks.
    be_promised: dict[RequestKey, int] = field(default_factory=dict)
    # When it got its candidate batch: seconds on the router's clock.
    batch_since_s: float = 0.0
    # Whether it has admitted a request of the candidate batch.
    is_batch_begun: bool = False
    # The number of the candidate batch, or of the last one.
    batch_number: int = 0
    # Whether the batch replaces earlier ones: see Offer.
    is_batch_replacing: bool = False

    # ---- real time that it will be offered soon ----
    # Whether each request has its first token.
    coming: dict[RequestKey, bool] = field(default_factory=dict)
    # The last announcement sent to it.
    announced: AnnounceRt = field(default_factory=lambda: AnnounceRt(0, 0))

    # ---- requests that run there ----
    running: dict[RequestKey, None] = field(default_factory=dict)
    be_running: dict[RequestKey, None] = field(default_factory=dict)
    # Running requests that are to leave, but found no room in the pool.
    refused: dict[RequestKey, None] = field(default_factory=dict)

    # Blocks of prompts that requests have in common there, or will have.
    prefixes: SharedPrefixes = field(default_factory=SharedPrefixes)

    # ---- queries to the pool on its behalf ----
    batch_search: Search = field(default_factory=Search)
    near_search: Search = field(default_factory=Search)

    @property
    def num_blocks(self) -> int:
        return self.hello.limits.num_blocks

    def blocks_of(self, request: RoutedRequest) -> int:
        """Returns how many of its blocks a request takes when its KV is loaded from the pool, beside those that others
        have there."""
        num_loaded, num_groups = self._num_loaded(request), self.hello.limits.span.num_groups
        num_found = self.prefixes.num_found(self._shared_hashes(request))
        return num_loaded - num_groups * min(num_found, num_loaded // num_groups)

    def _num_loaded(self, request: RoutedRequest) -> int:
        span = self.hello.limits.span
        # The pool counts in columns.
        num_pooled = span.num_groups * request.num_blocks
        if not span.window:
            return num_pooled
        return min(num_pooled, span.num_held(request.num_cached, request.num_tokens))

    def _shared_hashes(self, request: RoutedRequest) -> list[bytes]:
        """Returns the hashes of the blocks that the request may have in common with others."""
        limits = self.hello.limits
        if not limits.enable_prefix_caching or limits.window or not request.may_share:
            return []
        return request.block_hashes(limits.block_size)

    def blocks_to_run(self, request: RoutedRequest) -> int:
        """Returns the same, plus another column for the request's next tokens."""
        return self.blocks_of(request) + self.hello.limits.span.num_groups

    @property
    def num_available_blocks(self) -> int:
        """Blocks that are free and not promised to an offered request."""
        num_own = sum(self.batch.values()) + sum(self.near.values())
        return self.num_free_blocks - num_own - self.hello.limits.span.num_groups * self.prefixes.num_offered

    @property
    def num_available_slots(self) -> int:
        return self.hello.limits.max_num_seqs - len(self.running) - len(self.batch) - len(self.near)

    @property
    def num_blocks_for_rt(self) -> int:
        """Blocks that are free, or that best effort can give up, and that are not promised to real time."""
        num_be_blocks = self.report.num_be_blocks if self.report else 0
        num_promised = (
            sum(self.be_promised.values()) + self.hello.limits.span.num_groups * self.prefixes.num_be
        )
        return self.num_available_blocks + num_promised + num_be_blocks

    @property
    def num_slots_for_rt(self) -> int:
        return self.num_available_slots + len(self.be_promised) + len(self.be_running)

    @property
    def num_rt(self) -> int:
        """Real-time requests that run there or were offered to it."""
        return self.hello.limits.max_num_seqs - self.num_slots_for_rt

    @property
    def awaits_rt(self) -> bool:
        return len(self.be_promised) < len(self.batch) + len(self.near)

    def take_announcement(self) -> AnnounceRt | None:
        """Returns the announcement of coming real time that it should receive; None if it has not changed."""
        num_ready = sum(self.coming.values()) if self.coming else 0
        coming = AnnounceRt(len(self.coming) - num_ready, num_ready)
        if coming == self.announced:
            return None
        self.announced = coming
        return coming

    def begin_batch(self, replaces: bool = False) -> int:
        """Starts a new candidate batch. Returns its number."""
        if not self.batch:
            self.is_batch_begun = False
        self.batch_number += 1
        self.is_batch_replacing = replaces
        return self.batch_number

    def add_offered(self, request: RoutedRequest, is_batch: bool, now: float) -> None:
        """Counts the blocks that the request will need there, including one more column."""
        if is_batch and not self.batch:
            self.batch_since_s = now
        span, num_blocks = self.hello.limits.span, self._num_loaded(request)
        if request.num_cached < request.num_tokens - 1:
            # The pool may have only the first blocks.
            num_blocks = max(num_blocks, span.num_held(request.num_cached, request.num_tokens))
        hashes = self._shared_hashes(request)[: num_blocks // span.num_groups]
        self.prefixes.put(request, hashes, is_running=False)
        num_own = num_blocks + span.num_groups * (1 - len(hashes))
        (self.batch if is_batch else self.near)[request.key] = num_own
        if not request.is_rt:
            self.be_promised[request.key] = num_own

    def add_running(self, request: RoutedRequest) -> None:
        # A running request has all blocks of its prompt, or will soon.
        self.prefixes.put(request, self._shared_hashes(request), is_running=True)
        self.running[request.key] = None
        if not request.is_rt:
            self.be_running[request.key] = None

    def discard(self, key: RequestKey) -> None:
        """Removes a request that is no longer there, nor about to be offered. Safe to repeat."""
        self.coming.pop(key, None)
        self.be_promised.pop(key, None)
        self.be_running.pop(key, None)
        self.batch.pop(key, None)
        self.near.pop(key, None)
        self.running.pop(key, None)
        self.prefixes.discard(key)


@dataclass(eq=False, slots=True)
class ColocatedView(DecodeView):
    """An instance that decodes and also computes prompts."""

    prompts: AssignedPrompts = field(init=False)

    def __post_init__(self) -> None:
        self.prompts = _no_prompts(self)

    @property
    def pending(self) -> TokenCounts:
        return self.prompts.pending
