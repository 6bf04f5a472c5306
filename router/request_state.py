"""What the router keeps of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from alignedserve.protocol.messages import Request, Work
from alignedserve.scheduling.forecast import Forecast
from alignedserve.timing.deadlines import Deadlines
from alignedserve.types import InstanceId, PoolBlockId, RequestKey


class Phase(Enum):
    # some of its KV has to be computed
    QUEUED = "queued"
    # the same, and the pool was asked for room
    RESERVING = "reserving"
    # at a prefill instance, until its KV is in the pool
    PREFILLING = "prefilling"
    # all of its KV is in the pool
    POOLED = "pooled"
    # the same, and on its way into the buffer of a prefill instance, or there
    STAGED = "staged"
    # the same, and among the candidates of a decode instance
    OFFERED = "offered"
    # in the running batch of a decode instance
    RUNNING = "running"
    # the same, and the pool was asked for room to take it back
    MAKING_ROOM = "making room"
    # on its way from a decode instance to the pool
    EVICTING = "evicting"
    # instances were told to forget it, and may still read or write its blocks
    LEAVING = "leaving"


# real time on its way from prefill to a decode instance, which is told so
COMING_PHASES = {Phase.PREFILLING, Phase.POOLED, Phase.STAGED}

# A request that is evicted again and again has a long story; its beginning is enough.
MAX_TIMELINE_LEN = 64

# in the running batch of a decode instance: what the pool has is only a spare
RUNNING_PHASES = {Phase.RUNNING, Phase.MAKING_ROOM, Phase.EVICTING}


@dataclass(eq=False, slots=True)
class RequestState:
    request: Request
    gateway: InstanceId
    phase: Phase
    # when it came into its phase
    since_s: float
    output: list[int] = field(default_factory=list)
    # the instance that has it
    place: InstanceId | None = None
    # the prefill instance that holds a staged copy, for which decode instance, to go into which of its lists
    staged_at: InstanceId | None = None
    staged_for: InstanceId | None = None
    # the decode instance that was told to expect it
    expected_at: InstanceId | None = None
    is_in_batch: bool = False
    # instances that have not said yet that they forgot it
    pending_aborts: list[InstanceId] = field(default_factory=list)
    # its client has its answer, or is gone
    is_finished: bool = False
    # what the pool has of it: the KV of its first tokens, and blocks for more
    num_cached: int = 0
    blocks: list[PoolBlockId] = field(default_factory=list)
    # of its length; grows when it is exceeded
    forecast: Forecast = field(default_factory=Forecast)
    # on the router's clock: when it came to its gateway, and when its tokens are due
    arrived_s: float = 0.0
    deadlines: Deadlines = field(default_factory=Deadlines)
    # (phase, seconds since the router took it) for each phase that it entered
    timeline: list[tuple[str, float]] = field(default_factory=list)
    _taken_s: float = 0.0

    def __post_init__(self) -> None:
        self._taken_s = self.since_s

    def record_phase(self) -> None:
        """It has entered its phase."""
        is_new = not self.timeline or self.timeline[-1][0] != self.phase.value
        if is_new and len(self.timeline) < MAX_TIMELINE_LEN:
            self.timeline.append((self.phase.value, self.since_s - self._taken_s))

    @property
    def key(self) -> RequestKey:
        return self.request.key

    @property
    def is_rt(self) -> bool:
        return self.deadlines.is_rt

    @property
    def num_output(self) -> int:
        return len(self.output)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def demotion(self, now: float) -> int:
        """How often its answer has outgrown its prediction, of late."""
        return self.forecast.level(now)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.output)

    @property
    def num_reusable(self) -> int:
        """Tokens whose KV a prefill instance could take from the pool. The last one is computed again, or there would
        be nothing to sample from; and all, where the prompt's log-probabilities have not gone out yet."""
        if self.request.params.prompt_logprobs is not None and not self.output:
            return 0
        return min(self.num_cached, self.num_tokens - 1)

    @property
    def num_missing(self) -> int:
        """Tokens that a prefill instance would compute: at least one, or there is nothing to sample from."""
        return max(self.num_tokens - self.num_cached, 1)

    @property
    def is_pooled(self) -> bool:
        """Whether a decode instance could go on with what the pool has."""
        return bool(self.output) and self.num_cached == self.num_tokens - 1

    def work(self) -> Work:
        return Work(
            self.request,
            list(self.output),
            self.num_cached,
            list(self.blocks),
            self.deadlines,
            self.forecast.length,
        )
