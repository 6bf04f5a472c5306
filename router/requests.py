"""The requests that the router knows: the state of each, the table of all, and counts by phase. Pure.

The phases of a request:

    QUEUED -> RESERVING -> PREFILLING -> POOLED -> (STAGED ->) OFFERED -> RUNNING -> finished
       ^                       '-----------|-- directly (copies.py) -^       |
       |                                   ^                     MAKING_ROOM <-'
       |                                   |                          v
       '--- some of its KV was lost -------'------------------ EVICTING

From any phase a request may be recalled. It is then LEAVING until no instance can touch its pool blocks any more.
`RECORDS` shows what else is known of it in each phase.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from alignedserve.kv.span import KvSpan
from alignedserve.protocol.messages import Request, Work
from alignedserve.scheduling.forecast import Forecast
from alignedserve.scheduling.prefixes import BlockHasher, block_hashes
from alignedserve.timing.deadlines import Deadlines
from alignedserve.types import InstanceId, PoolBlockId, RequestKey

# ---- the state of one ------------------------------------------------------------------------------------------------


class Phase(Enum):
    # Some of the request's KV has to be computed.
    QUEUED = "queued"
    # The same, and the pool was asked for blocks.
    RESERVING = "reserving"
    # A prefill instance has the request until all of its KV is in the pool.
    PREFILLING = "prefilling"
    # The pool has all of the request's KV.
    POOLED = "pooled"
    # The pool has its KV, and a prefill instance loads it into its staging buffer, or has done so.
    STAGED = "staged"
    # A decode instance has the request among its candidates. The pool has its KV, or is getting it (`saving_at`).
    OFFERED = "offered"
    # The request is in the running batch of a decode instance.
    RUNNING = "running"
    # It still runs, and the pool was asked for blocks to take it back.
    MAKING_ROOM = "making room"
    # Its KV is on its way from a decode instance to the pool.
    EVICTING = "evicting"
    # Instances were told to forget the request, or to save its complete answer, and may still read or write its pool
    # blocks.
    LEAVING = "leaving"


# Phases in which a request is in the running batch of a decode instance, so the pool's copy of its KV is a spare.
RUNNING_PHASES = {Phase.RUNNING, Phase.MAKING_ROOM, Phase.EVICTING}

# Which records a request has in each phase: after each event, one of these combinations (`RequestState.check`).
RECORDS: dict[Phase, tuple[str, ...]] = {
    Phase.QUEUED: ("",),
    Phase.RESERVING: ("",),
    Phase.PREFILLING: ("instance_id",),
    Phase.POOLED: ("",),
    Phase.STAGED: ("instance_id staged",),
    Phase.OFFERED: ("instance_id", "instance_id staged", "instance_id staged saving_at"),
    Phase.RUNNING: ("instance_id", "instance_id saving_at"),
    Phase.MAKING_ROOM: ("instance_id",),
    Phase.EVICTING: ("instance_id",),
    Phase.LEAVING: ("leaving", "staged leaving", "saving_at leaving", "staged saving_at leaving"),
}

# The most entries of a timeline. A request that is evicted repeatedly enters many phases, but the first ones explain
# its latency.
MAX_TIMELINE_LEN = 64


@dataclass(frozen=True, slots=True)
class Staged:
    """A copy of a request's KV at a prefill instance, in the staging buffer or where it was computed."""

    at: InstanceId
    # The decode instance that the copy is for.
    decode: InstanceId
    # Whether that decode instance will be offered the request as part of its candidate batch, and the number of its
    # batch; 0: none.
    is_in_batch: bool = False
    batch: int = 0


@dataclass(eq=False, slots=True)
class Leaving:
    """What a request that is LEAVING waits for. Changed by `Recaller` and `EndedAnswers`."""

    # Instances that may still have it.
    pending_aborts: list[InstanceId]
    # Whether the pool was asked for room for its complete answer.
    wants_answer_kept: bool = False


@dataclass(eq=False, slots=True)
class RequestState:
    # ---- what it is: written when the router accepts it ----
    request: Request
    # The gateway that receives its tokens.
    gateway: InstanceId

    # ---- where it is: written only by `PhaseTransitions` ----
    phase: Phase
    # When it entered its phase: seconds on the router's clock.
    since_s: float
    # The instance that has it.
    instance_id: InstanceId | None = None
    staged: Staged | None = None
    # The prefill instance that still saves its KV to the pool, though a decode instance has the request.
    saving_at: InstanceId | None = None
    leaving: Leaving | None = None
    # The decode instance that was last told to expect it.
    expected_at: InstanceId | None = None
    # Whether its client has its answer, or is gone.
    is_finished: bool = False

    # Tokens to compute for which its owner's turn was counted since its prompt was last computed. Added by `Line`.
    num_counted: int = 0

    # ---- its output tokens so far: written by `OutputProcessor` ----
    output: list[int] = field(default_factory=list)

    # ---- what the pool has of it ----
    # The number of its first tokens with KV in the pool.
    num_cached: int = 0
    # Its pool blocks, those of the cached tokens first.
    blocks: list[PoolBlockId] = field(default_factory=list)
    # The number of its first tokens with KV that other requests had left there.
    num_found: int = 0
    # Its own columns there before this one may lack blocks of sliding groups.
    first_whole: int = 0
    # Whether it shares no KV, because a copy failed, its KV may be wrong, or its blocks are reversed.
    is_alone: bool = False
    # See Work.
    era: int = 0
    # The number of its first tokens for which it has waited until another request had brought their KV. Written by
    # `PrefixesInFlight`.
    num_awaited: int = 0
    # The number of the Reserve that is not answered yet, or 0. Answers to earlier ones are void.
    reserve_number: int = 0

    # ---- what is expected of it ----
    # The expected length of its answer. It doubles each time the answer exceeds it.
    forecast: Forecast = field(default_factory=Forecast)
    # The number of output tokens for which `PoolDemand` counts blocks. Written by `PoolDemand`.
    demanded_output: int = sys.maxsize
    # When it arrived at its gateway: seconds on the router's clock.
    arrived_s: float = 0.0
    # When its tokens are due: seconds on the router's clock.
    deadlines: Deadlines = field(default_factory=Deadlines)

    # ---- what its gateway is told about its progress ----
    # (phase, seconds since the router accepted the request) for each phase that it entered
    timeline: list[tuple[str, float]] = field(default_factory=list)
    _taken_s: float = 0.0
    # Computed when first read.
    _prefix_hashes: Sequence[bytes] | None = None
    _block_hashes: list[bytes] | None = None
    _hasher: BlockHasher | None = None

    # The request's key. A field rather than a property, because it is read several times per token.
    key: RequestKey = field(init=False)

    def __post_init__(self) -> None:
        self._taken_s, self.key = self.since_s, self.request.key

    def check(self) -> None:
        """Raises RuntimeError if its records do not go with its phase."""
        names = ("instance_id", "staged", "saving_at", "leaving")
        records = " ".join(name for name in names if getattr(self, name))
        if records not in RECORDS[self.phase]:
            raise RuntimeError(f"request {self.key} is {self.phase.value}, with these records: {records}")

    def record_phase(self) -> None:
        """Adds the phase that the request has just entered to its timeline."""
        is_new = not self.timeline or self.timeline[-1][0] != self.phase.value
        if is_new and len(self.timeline) < MAX_TIMELINE_LEN:
            self.timeline.append((self.phase.value, self.since_s - self._taken_s))

    @property
    def is_rt(self) -> bool:
        return self.deadlines.is_rt

    @property
    def owner(self) -> str:
        return self.request.owner

    @property
    def is_embedding(self) -> bool:
        return self.request.is_embedding

    @property
    def num_output(self) -> int:
        return len(self.output)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def demotion(self, now: float) -> int:
        """Returns how often its answer has exceeded its predicted length, less what was forgiven by `now`."""
        return self.forecast.level(now)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.output)

    @property
    def num_reusable(self) -> int:
        """The number of tokens with KV that a prefill instance could load from the pool. The last token is always
        computed again, because sampling needs it. If the prompt's log-probabilities or the mean of its states are
        requested, all tokens are computed until the first output token."""
        if self.request.needs_whole_prompt and not self.output:
            return 0
        return min(self.num_cached, self.num_tokens - 1)

    @property
    def may_share(self) -> bool:
        """Whether it may have KV in common with requests that begin alike."""
        return not (self.is_alone or self.request.needs_whole_prompt)

    @property
    def prefix_hashes(self) -> Sequence[bytes]:
        """The hashes of its prompt by which prefix caches are searched."""
        if self._prefix_hashes is None:
            self._prefix_hashes = block_hashes(self.request)
        return self._prefix_hashes

    def block_hashes(self, block_size: int) -> list[bytes]:
        """Returns the hashes of its prompt's full blocks. The block size is always the same."""
        if self._block_hashes is None:
            wanted = self.request
            self._hasher = BlockHasher(block_size, wanted.cache_salt, wanted.adapter)
            self._block_hashes = self._hasher.block_hashes_of(wanted.prompt)
        return self._block_hashes

    def take_answer_hashes(self, block_size: int) -> list[bytes]:
        """Returns the hashes of the answer's full blocks, which follow those of its prompt. Its last token has no KV.
        Call it once, when the answer is complete."""
        num_before = len(self.block_hashes(block_size)) * block_size
        if self._hasher is None:
            raise RuntimeError(f"request {self.key}: the hashes of its answer were taken before")
        hasher, self._hasher = self._hasher, None
        return hasher.block_hashes_of([*self.request.prompt[num_before:], *self.output[:-1]])

    def take_blocks(self, blocks: list[PoolBlockId], num_tokens: int, num_found: int, span: KvSpan) -> None:
        """Takes the blocks that the pool has given it. There is KV of its first `num_tokens` tokens in them. If it had
        none before, or has lost it, other requests had left that of the first `num_found`."""
        if not (self.blocks and num_tokens):
            self.num_cached = span.num_usable(num_tokens, self.num_tokens)
            self.num_cached, self.num_found = self.num_reusable, num_found
        self.blocks = blocks

    def lose_blocks(self) -> None:
        """Notes that the pool has nothing of it."""
        self.num_cached, self.num_found, self.first_whole, self.blocks = 0, 0, 0, []

    def note_gaps(self, num_tokens: int, span: KvSpan) -> None:
        """Notes that an instance saves its KV up to `num_tokens` tokens, without blocks that these have passed."""
        self.first_whole = max(self.first_whole, span.num_passed(num_tokens))

    @property
    def num_missing(self) -> int:
        """The number of tokens that a prefill instance would compute. At least one, because sampling needs it."""
        return max(self.num_tokens - self.num_cached, 1)

    @property
    def is_pooled(self) -> bool:
        """Whether a decode instance could continue with what the pool has."""
        return bool(self.output) and self.num_cached == self.num_tokens - 1

    def work(self, num_cached: int | None = None) -> Work:
        """Returns the request for an instance. `num_cached`: the number of tokens with KV; None: those that the pool
        has."""
        return Work(
            self.request,
            list(self.output),
            self.num_cached if num_cached is None else num_cached,
            list(self.blocks),
            self.deadlines,
            self.forecast.length,
            self.num_found,
            self.is_alone,
            self.era,
        )


# ---- all of them -----------------------------------------------------------------------------------------------------


class RequestTable:
    """All requests that the router knows, by their keys. A request stays until nothing is left of it anywhere."""

    def __init__(self) -> None:
        self._states: dict[RequestKey, RequestState] = {}
        # Returns the request with this key; None: there is none.
        self.get: Callable[[RequestKey], RequestState | None] = self._states.get

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        """Yields requests in the order in which the router accepted them. The table may change meanwhile."""
        return iter(list(self._states.values()))

    def __getitem__(self, key: RequestKey) -> RequestState:
        return self._states[key]

    def find(self, key: RequestKey, instance_id: InstanceId, *phases: Phase) -> RequestState | None:
        """Returns the request if this instance has it and it is in one of these phases. Messages cross, so an instance
        may report on a request that it was told to forget."""
        state = self._states.get(key)
        return state if state and state.instance_id == instance_id and state.phase in phases else None

    def add(self, state: RequestState) -> None:
        self._states[state.key] = state

    def remove(self, state: RequestState) -> None:
        del self._states[state.key]


# ---- counts by phase -------------------------------------------------------------------------------------------------


class _Counted(NamedTuple):
    tier: str
    phase: str
    # The instances that have the request, or a staged copy of its KV.
    instance_ids: frozenset[InstanceId]


class RequestCounts:
    """How many requests are in which phase, per tier and per instance. Pure.

    Requests are counted as they change, so `/health` takes as long for one request as for thousands."""

    def __init__(self) -> None:
        self._counted: dict[RequestKey, _Counted] = {}
        self._tiers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._instances: defaultdict[InstanceId, Counter[str]] = defaultdict(Counter)

    def update(self, state: RequestState) -> None:
        """Replaces a request's old count with its current one. A finished request is not counted."""
        if old := self._counted.pop(state.key, None):
            self._count(old, -1)
        if not state.is_finished:
            staged_at = state.staged.at if state.staged else None
            instance_ids = frozenset(each for each in (state.instance_id, staged_at) if each)
            self._counted[state.key] = new = _Counted(state.request.tier, state.phase.value, instance_ids)
            self._count(new, 1)

    @property
    def by_phase(self) -> dict[str, int]:
        return dict(sum(self._tiers.values(), Counter()))

    @property
    def by_tier(self) -> dict[str, dict[str, int]]:
        return {tier: dict(+counts) for tier, counts in self._tiers.items() if counts.total()}

    def at_instance(self, instance_id: InstanceId) -> dict[str, int]:
        return dict(+self._instances[instance_id]) if instance_id in self._instances else {}

    def _count(self, counted: _Counted, sign: int) -> None:
        self._tiers[counted.tier][counted.phase] += sign
        for instance_id in counted.instance_ids:
            self._instances[instance_id][counted.phase] += sign
