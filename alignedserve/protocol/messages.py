"""What crosses a process boundary: small records of ids, ints and bytes, msgpack on the wire.

The router is the hub. Every other process opens one connection to it, sends `Hello`, and from then on sends events and
receives orders; an order is obeyed once, in the order of arrival. A state is sent as a whole once, and then its
changes. Decoding checks every field's type (`msgspec`), in one place: `alignedserve/protocol`.

A request's `tokens` are its prompt and what it has generated; the KV of the first `num_cached` of them exists;
`blocks` are ids of blocks in the pool's segment, in the order of the tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from alignedserve.protocol.kv_span import TILE_TOKENS, KvSpan
from alignedserve.sampling_params import SamplingParams
from alignedserve.timing.cost import CostModel
from alignedserve.timing.deadlines import Deadlines
from alignedserve.types import Epoch, InstanceId, PoolBlockId, RequestKey

# The roles of the processes which connect to the router. "launcher" is the command that started the others; a
# colocated instance does what prefill and decode instances do.
ROLES = ("kvpool", "prefill", "decode", "colocated", "gateway", "launcher")
# Instances may change from one of these to the other: see TakeRole.
ROLES_THAT_CHANGE = (PREFILL, DECODE) = ("prefill", "decode")


class Message(msgspec.Struct, tag=True, array_like=True):
    """Fields may be added at the end, with a default."""


# ---- connections ----------------------------------------------------------------------------------------------------


class Hello(Message):
    """The first message of every process to the router, once both have proved that they know the cluster's token. An
    instance that has taken another role says it again: see TakeRole."""

    # One of ROLES.
    role: str
    instance_id: InstanceId
    epoch: Epoch
    pid: int
    # What has to be the same everywhere: model, dtype, block format, ... If one differs the router refuses the
    # process, and names it.
    fingerprint: dict[str, str]
    # An instance's limits; or, for a pool, the number and size of its blocks, each of which is a whole column, and the
    # window that instances keep.
    limits: InstanceLimits
    # A pool's segment, and what was in it when the pool attached to it.
    segment: str = ""
    inventory: list[Stored] = []
    # "host:port" from which a prefill instance's staged KV is pulled, unless its link is the pool's memory.
    link: str = ""
    # How long an instance's iterations take, if that is known.
    cost: CostModel | None = None
    # When the process was started: seconds since 1970 on its host's wall clock, for people to read.
    started_s: float = 0.0


class InstanceLimits(Message):
    num_blocks: int = 0
    block_size: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_model_len: int = 0
    # How many blocks of a prefill instance may hold staged KV for decode instances.
    num_staging_blocks: int = 0
    block_bytes: int = 0
    # Whether prompts which share a prefix with earlier prompts reuse its KV.
    enable_prefix_caching: bool = False
    # The most tokens of one request in one iteration of a colocated instance; 0: as many as of all requests.
    max_prefill_chunk: int = 0
    # Where the inputs of layers may be kept of a request in place of its KV: an iteration runs no more such requests
    # than have KV in so many blocks. 0: of none.
    max_restored_blocks: int = 0
    # Blocks of sliding groups of layers before so many of the latest tokens are not held; 0: all are.
    window: Annotated[int, Meta(ge=0)] = 0
    # See LayerGroups.
    num_full_groups: Annotated[int, Meta(ge=0)] = 0
    num_sliding_groups: Annotated[int, Meta(ge=1)] = 1
    # Blocks of sliding groups are given up in steps of this many tokens: see kv_span.py.
    tile_tokens: Annotated[int, Meta(ge=1)] = TILE_TOKENS

    @property
    def can_keep_inputs(self) -> bool:
        return self.max_restored_blocks > 0

    @property
    def span(self) -> KvSpan:
        return self._span(self.max_num_batched_tokens)

    @property
    def num_kv_tokens(self) -> int:
        """The number of tokens for which there are blocks, where nothing is passed."""
        return self.num_blocks // (self.num_full_groups + self.num_sliding_groups) * self.block_size

    def num_tokens_of(self, length: int) -> int:
        """The number of tokens for which there are blocks, where requests of this length decode."""
        span, num_columns = self.decode_span, -(-max(length, 1) // self.block_size)
        num_blocks = span.num_held(max(length - 1, 0), max(length, 1))
        return self.num_blocks * num_columns // num_blocks * self.block_size

    @property
    def max_request_blocks(self) -> int:
        """The most blocks that a request has which computes a token at a time."""
        span = self.decode_span
        return span.num_at_most(span.num_columns(self.max_model_len))

    @property
    def decode_span(self) -> KvSpan:
        """The blocks of a request which computes a token at a time."""
        return self._span(1)

    def _span(self, max_step: int) -> KvSpan:
        return _span_of(
            self.block_size,
            self.window,
            max_step,
            self.num_full_groups,
            self.num_sliding_groups,
            self.tile_tokens,
        )


# Policies read the span of the same few limits at each event.
_span_of = lru_cache(maxsize=256)(KvSpan)


class Stored(Message):
    """A request whose KV is in the pool, and where."""

    key: RequestKey
    blocks: list[PoolBlockId]
    num_tokens: int


class Welcome(Message):
    router_epoch: Epoch
    # A router which sends nothing for so many seconds hangs; 0: it may be silent.
    silence_s: float = 0.0


class UsePool(Message):
    """To instances, when they connect and when a pool does: orders them to map this segment. All earlier orders are
    void."""

    segment: str


class Refused(Message):
    """The router closes the connection after this."""

    reason: str


class Ping(Message):
    """The router pings each process regularly, and the process answers with Pong; `alignedserve/protocol` does both."""


class Pong(Message):
    pass


# ---- gateway to router ----------------------------------------------------------------------------------------------


class Request(Message):
    """Everything that is needed to run a request anywhere, at any time, again."""

    # The gateway chooses it at random, so that it stays unique over all gateways and restarts.
    key: RequestKey
    prompt: list[int]
    params: SamplingParams
    # The noise for the request's token k is a function of (seed, k).
    seed: int
    # The time of arrival by time.monotonic() on the gateway's host, or in a simulation; elsewhere only its order
    # counts.
    arrival_s: float
    # The seconds from arrival until the first token is due; None: it has no deadline.
    ttft_s: float | None = None
    # The seconds from one token until the next is due.
    tbt_s: float | None = None
    # "rt": a person waits for each token. "be": best effort, due as a whole at `deadline_s`, if that is given; that is
    # by the same clock as `arrival_s`.
    tier: str = "rt"
    deadline_s: float | None = None
    # The id of the HTTP call that the request is part of, for logs; empty if there is none.
    request_id: str = ""
    # Which of "ttft_s" and "tbt_s" are the operator's defaults. If the model can't meet one even alone, it is raised
    # instead of the request being refused.
    slo_defaults: list[str] = []
    # The request shares KV only with requests that have the same salt.
    cache_salt: str = ""
    # One of `pooling.POOLINGS`: an embedding of the prompt is wanted, and no token. Nothing of it goes to the pool, nor
    # to a decode instance. None: tokens are wanted.
    pooling: str | None = None
    # Whether the gateway is told how far the prompt is, until the first token.
    reports_progress: bool = False
    # Whether nobody asked for `tbt_s`: the sooner each token comes the better. Of real time alone.
    hurries: bool = False
    # Whether jobs would be done too late at their present speed. Of best effort alone.
    is_pressed: bool = False
    # The name of its adapter, on which all of its KV depends; empty: it has none.
    adapter: str = ""

    @property
    def is_embedding(self) -> bool:
        return self.pooling is not None

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether all of the prompt has to be computed at once, whatever KV of it there is: for its log-probabilities
        (until its first token), or for a mean of all its states."""
        return self.params.prompt_logprobs is not None or self.pooling == "mean"


class Submit(Message):
    request: Request
    # The tokens that the client has already, after a router's death: they are not sent again.
    delivered: list[int] = []
    # The predicted number of output tokens, the delivered ones included; 0: unknown.
    predicted_len: int = 0
    # The seconds since the first byte of the call arrived, on the gateway's clock: the router computes the deadlines
    # on its own clock from it.
    waited_s: float = 0.0


class Abort(Message):
    """From a gateway: no client waits for this request any more. From the router: drop it, whatever its state."""

    key: RequestKey


class Echo(Message):
    """A gateway sends it and the router sends it back unchanged: then all messages before it have been handled."""

    ticket: int


# ---- router to gateway ----------------------------------------------------------------------------------------------


class NewTokens(Message):
    key: RequestKey
    # The number of output tokens before these, by which repeated tokens are recognised.
    first: int
    tokens: list[int]
    # One (logprob, rank, {token: logprob}) per token, where asked for; else empty.
    logprobs: list[Any] = []
    # "stop", "length", "abort", "error", or None while the request goes on.
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    # The packed log-probabilities of the prompt, with the first token, where asked for: see
    # alignedserve/protocol/prompt_logprobs.py.
    prompt_logprobs: bytes = b""
    # With the first token: the number of prompt tokens whose KV was reused from earlier prompts that share a prefix.
    num_reused: int = 0
    # The embedding of the prompt, with the end of a request for one: see alignedserve/protocol/pooling.py.
    embedding: bytes = b""


class PromptProgress(Message):
    """How much of a prompt is computed; all of it, when its first token comes."""

    key: RequestKey
    # Of the prompt.
    num_tokens: int
    num_computed: int
    # The number of prompt tokens whose KV was reused from earlier prompts; they count as computed.
    num_reused: int
    # Since an instance began with it.
    seconds: float


class Tokens(Message):
    """The new tokens of all requests of this gateway in one report."""

    news: list[NewTokens]
    # For requests with their first or last token, and requests that the gateway has aborted: (state, seconds since the
    # router took the request) for each state that the request has entered.
    timelines: dict[RequestKey, list[tuple[str, float]]] = {}
    # Of requests that had no tokens before these.
    progress: list[PromptProgress] = []


class Rejected(Message):
    """The request was not taken."""

    key: RequestKey
    # "full" (try again), "too_long" (it can never fit), "duplicate", or "slo" (the model can't be so fast).
    reason: str
    message: str


# ---- router to pool, and back ---------------------------------------------------------------------------------------


class Reserve(Message):
    """Asks for blocks for the KV of `num_tokens` tokens in all. The reservation lapses at a deadline."""

    key: RequestKey
    num_tokens: int
    # See Request.
    request_id: str = ""
    # Counts the router's Reserves, from 1. The answer has the same number.
    number: int = 0


class Reserved(Message):
    """Answers Reserve. It is also sent unasked when a reservation has lapsed: `blocks` is None and `dropped` is the
    request."""

    key: RequestKey
    # All of the request's blocks; None: there is no room, and nothing has changed.
    blocks: list[PoolBlockId] | None
    # The requests which have nothing left in the pool: their spare copies were dropped to make room.
    dropped: list[RequestKey] = []
    # That of the Reserve which it answers; 0: it was not asked for.
    number: int = 0


class Commit(Message):
    """The KV of the first `num_tokens` tokens is in the request's blocks, and this is its authoritative copy."""

    key: RequestKey
    num_tokens: int
    # The time by which the request should be admitted to a decode instance.
    due_s: float
    # False: the pool keeps the KV but forms no batches with the request.
    is_candidate: bool = True


class MakeSpare(Message):
    """The KV lives in a decode instance now: the pool may drop this copy when room is needed."""

    keys: list[RequestKey]


class Release(Message):
    keys: list[RequestKey]


class FormBatch(Message):
    decode: InstanceId
    # Of the decode instance.
    max_blocks: int
    min_requests: int
    max_requests: int
    # A range of lengths which has yielded no batch for so many seconds goes before denser ones.
    starvation_s: float = 2.0
    # See Offer.
    replaces: bool = False


class FindNear(Message):
    """Asks for candidates whose length lies within low .. high, the nearest to the middle first."""

    decode: InstanceId
    low: int
    high: int
    # Of the decode instance.
    max_blocks: int
    max_requests: int
    # The number of the running batch, which the answer has as well: they are looked for to join it.
    batch: int = 0


class Candidates(Message):
    """Answers FormBatch and FindNear. These requests are no longer candidates, until they are committed again."""

    decode: InstanceId
    keys: list[RequestKey]
    # True: they are a batch, to run next. False: they belong with the batch that runs now.
    is_batch: bool
    # See FindNear.
    batch: int = 0
    # See Offer.
    replaces: bool = False


# ---- router to instances --------------------------------------------------------------------------------------------


class Work(Message):
    """A request, with what an instance needs to go on with it."""

    request: Request
    # The output tokens so far.
    output: list[int]
    num_cached: int
    # The request's pool blocks, those of the cached tokens first.
    blocks: list[PoolBlockId]
    deadlines: Deadlines = Deadlines()
    # The predicted number of output tokens in all; 0: unknown.
    predicted_len: int = 0


class Prefill(Message):
    """Order: load the cached tokens' KV, compute the rest in chunks, save what is new to the pool, and sample a
    token."""

    works: list[Work]


class Stage(Message):
    """Order: load the KV of these requests into the staging buffer, from which the decode instance will pull it."""

    decode: InstanceId
    works: list[Work]


class Unstage(Message):
    """Order: free the blocks of these requests in the staging buffer; and those of prompts that were held (see
    PrefillReport), once their KV is in the pool."""

    keys: list[RequestKey]


class Offer(Message):
    """Offers requests to a decode instance, which admits them when it has room: candidate requests first, then the
    batch."""

    works: list[Work]
    is_batch: bool
    # The prefill instance that has staged them, or that holds the blocks in which it has computed their KV; None: their
    # KV is loaded from the pool.
    source: InstanceId | None = None
    # The source's `Hello.link`.
    address: str = ""
    # The number of the batch that they belong to, which may come in several parts; 0: they belong to none. The router
    # numbers a decode instance's batches from 1 on.
    batch: int = 0
    # Whether this batch is to run in place of those with smaller numbers, not beside them.
    replaces: bool = False


class Coming(Message):
    """Announces real-time requests that the decode instance will be offered soon, so that it starts no long iteration
    now."""

    # The number of announced requests whose prompt is being computed.
    num_prefilling: int
    # The number of announced requests which have their first token, and whose KV is on its way to the pool.
    num_ready: int


class Evict(Message):
    """Order: save the request's KV to these pool blocks (that of the first `num_saved` tokens is there already), and
    drop it."""

    key: RequestKey
    blocks: list[PoolBlockId]
    num_saved: int


class TakeRole(Message):
    """Order: be a prefill or a decode instance from here on. It comes when nothing is left to do, and the instance
    answers with another Hello on the same connection; orders come again after the Welcome for that."""

    role: str


# ---- instances to router --------------------------------------------------------------------------------------------


class Moved(Message):
    """How much KV was copied, and how long that took."""

    # "save", "load" or "pull".
    what: str
    num_bytes: int
    # The time that the copies took, one after the other.
    seconds: float


class PrefillReport(Message):
    """What happened in an iteration of a prefill instance."""

    news: list[NewTokens]
    # The requests all of whose KV is in the pool, and the number of their tokens.
    saved: list[tuple[RequestKey, int]]
    # The requests whose KV is in the staging buffer.
    staged: list[RequestKey]
    # (request, number of computed tokens, number of these whose KV was reused from earlier prompts) of requests whose
    # prompt is not finished.
    progress: list[tuple[RequestKey, int, int]]
    num_free_blocks: int
    duration_s: float = 0.0
    # The copies since the last report.
    moved: list[Moved] = []
    # How much longer iterations take than predicted: the ratio of measured to predicted time.
    pace: float = 1.0
    # The number of tokens whose KV was computed since the last report.
    num_computed: int = 0
    # The number of tokens of requests that started since the last report, and how many of these were in the prefix
    # cache.
    num_asked: int = 0
    num_found: int = 0
    # The real-time requests whose prompts were just computed, and whose KV decode instances may pull from where it is,
    # beside the copy to the pool: it is held until one has pulled it, or Unstage comes.
    held: list[RequestKey] = []


class FailedPull(Message):
    """A transfer from a prefill instance failed: the link did, or one of its ends. That a request is staged there no
    more is no such failure."""

    source: InstanceId
    keys: list[RequestKey]
    reason: str


class DecodeReport(Message):
    """What happened in an iteration of a decode instance; it is also sent, without tokens, when any other field
    changes."""

    news: list[NewTokens]
    admitted: list[RequestKey]
    # The requests for which the instance asks for Evict orders; they may stand still until these come.
    wants_evicted: list[RequestKey]
    # (request, number of tokens whose KV is in the pool now).
    evicted: list[tuple[RequestKey, int]]
    num_free_blocks: int
    num_running: int
    # Of all running requests, in tokens.
    max_length: int
    sum_lengths: int
    duration_s: float = 0.0
    min_length: int = 0
    # The copies since the last report.
    moved: list[Moved] = []
    # How much longer iterations take than predicted: the ratio of measured to predicted time.
    pace: float = 1.0
    # The number of blocks that best-effort requests hold.
    num_be_blocks: int = 0
    num_be_running: int = 0
    # The number of tokens whose KV was computed since the last report.
    num_computed: int = 0
    # A colocated instance fills these as a prefill instance does: see PrefillReport.
    progress: list[tuple[RequestKey, int, int]] = []
    num_asked: int = 0
    num_found: int = 0
    # The number of the running batch: of the latest from which a request was admitted; 0: there was none yet.
    batch: int = 0
    # Of those running requests that belong to it, in tokens; 0: there are none.
    batch_min_length: int = 0
    batch_max_length: int = 0
    # Whether requests of several batches ran, or some of a batch beside some of none.
    is_mixed: bool = False
    # Seconds between the last iteration and this one, copies that it waited for included; None: there was nothing to
    # compute.
    scheduling_s: float | None = None
    # The recent seconds of an iteration in which the engine computes nothing.
    outside_s: float = 0.0
    # The requests that the instance has dropped with their KV: it is to be computed again.
    dropped: list[RequestKey] = []
    # How much longer than predicted the last iteration took: the ratio of measured to predicted time.
    overrun: float = 1.0
    failed_pulls: list[FailedPull] = []


class Gone(Message):
    """Answers Abort, always: nothing is left of these requests here, and the instance no longer reads or writes their
    pool blocks."""

    keys: list[RequestKey]


class Failed(Message):
    """A transfer did not happen. The request's KV at the source is unchanged."""

    key: RequestKey
    # "load", "save", "pull" or "evict".
    what: str
    reason: str


# ---- about the cluster itself; between gateways, the launcher, and the router's shell --------------------------------


class PoolUse(Message):
    """A pool sends it when its use has changed."""

    num_free_blocks: int
    # The blocks of spare copies, which become free as soon as they are needed.
    num_spare_blocks: int


class AskCluster(Message):
    """Asks the router for Cluster."""

    # The answer has the same ticket.
    ticket: int


# The upper ends, in seconds, of the ranges in which scheduling times are counted.
SCHEDULING_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class InstanceStats(Message):
    """What an instance has counted. The counts go on when the instance is started again, and start at zero with the
    router."""

    # The number of requests that had to leave the running batch, and of those among them whose KV was kept.
    num_preemptions: int = 0
    num_evictions: int = 0
    # The number of staged copies that were dropped before the request was admitted.
    num_spills: int = 0
    # The number of offered batches from which a request was admitted.
    num_batch_switches: int = 0
    # The number of iterations since the first batch ran, and of those among them that had requests of several batches,
    # or of a batch and of none.
    num_batch_iterations: int = 0
    num_mixed_iterations: int = 0
    # The number of iterations with a scheduling time in each range of SCHEDULING_S, and of those above; and the sum of
    # these times in seconds.
    scheduling: list[int] = []
    scheduling_s: float = 0.0
    # Of all running requests, in tokens.
    min_length: int = 0
    max_length: int = 0
    # The bytes of KV in the staging buffer.
    staged_bytes: int = 0
    moved: list[Moved] = []
    # The number of tokens whose KV was computed, and the time of the iterations that computed them.
    num_computed_tokens: int = 0
    computing_s: float = 0.0
    # The number of tokens of requests that started, and how many of them were in the prefix cache.
    num_asked_tokens: int = 0
    num_found_tokens: int = 0
    # The number of transfers from prefill instances that failed: see FailedPull.
    num_failed_pulls: int = 0
    # The prefill instances whose KV comes to it through host memory, since pulls from them have failed.
    over_host: list[InstanceId] = []
    # The number of requests whose KV decode instances pulled from where this instance had just computed it.
    num_handed_over: int = 0


class ProcessStatus(Message):
    """A process, as the router knows it."""

    role: str
    instance_id: InstanceId
    epoch: Epoch
    pid: int
    # "up"; or "down": the process was connected and is expected back.
    state: str
    num_blocks: int
    num_free_blocks: int
    # The number of requests that the process has in each state.
    requests: dict[str, int]
    stats: InstanceStats = msgspec.field(default_factory=InstanceStats)
    # See Hello.
    started_s: float = 0.0


class Cluster(Message):
    """Answers AskCluster; it is also sent to launchers, with ticket 0, whenever a process comes or goes."""

    ticket: int
    processes: list[ProcessStatus]
    # The number of requests in each state, in the whole island.
    requests: dict[str, int]
    # The same for each tier.
    tiers: dict[str, dict[str, int]] = {}
    # For each role: how many requests went on without a process that was lost, since the router started.
    recoveries: dict[str, int] = {}
    # How often classes shared: "demoted" (real time that could not keep its objective any more), "express" (real time
    # on the RT fast path, from the pool), "evicted_for_rt" (best effort that was evicted for it), "recomputed"
    # (requests whose KV was thrown away).
    sharing: dict[str, int] = {}
    # For each role: how often an instance took it while it ran, since the router started.
    role_changes: dict[str, int] = {}


class Load(Message):
    """From the router to gateways and the launcher, several times a second: how much the island has to do."""

    num_requests: int
    # The share of the last seconds in which instances computed: the mean of the role that did so most.
    busy: float
    # Of prompts that wait or are being computed, the tokens that are to be computed: of real time, and of all.
    num_rt_tokens: int = 0
    num_tokens: int = 0
    # The number of instances that compute prompts, and of those that decode.
    num_prefills: int = 0
    num_decodes: int = 0
    # How many tokens of a prompt one of them computes in a second; 0: that is not known.
    tokens_per_s: float = 0.0
    # Whether real time would wait for a place to decode.
    is_full: bool = False
    # The number of tokens that their prefix caches hold; 0: there are none.
    num_cache_tokens: int = 0


class Drain(Message):
    """From a launcher, passed on to gateways: take no new requests, finish those that run, and then end."""


class Retire(Message):
    """From the launcher to a gateway whose place another one has taken: take no more connections, and end when all that
    you have are closed."""


class Stop(Message):
    """From a launcher: the system shuts down. The router sends it on to all processes, and then stops itself."""


class IslandAt(Message):
    """The address of an island's router; the system's token is the same everywhere."""

    # Different for each island that there ever was in this system.
    number: int
    host: str
    port: int
    # See RouterAddress.
    path: str | None = None
    # Whether it is being given back: new requests go to others while there are some.
    is_leaving: bool = False


class Membership(Message):
    """From the launcher to gateways, when they connect and whenever it changes: these islands are there."""

    islands: list[IslandAt]
    # What should be there and is not, a line each, for people to read.
    missing: list[str] = []
    # How many islands the traffic would need, whatever the limit is; 0: nobody says.
    num_wanted: int = 0


class Attainment(Message):
    """From a gateway to the launcher, each second: what became of objectives since the last time."""

    # Of real time. A request that was refused since the queue was full has missed one.
    num_met: int
    num_missed: int
    # Whether batch jobs would be done too late at their present speed.
    are_late: bool


class GatewayNews(Message):
    """What a gateway tells the other gateways of its host, each second; the launcher passes it on."""

    gateway: InstanceId
    # What it has measured (see gateway/telemetry/exposition.py).
    metrics: bytes
    # Of batch jobs: the seconds until each is done, if that is known, and the share of it that is done.
    estimates: dict[str, tuple[float | None, float]]


AnyMessage = (
    Hello
    | Welcome
    | UsePool
    | Refused
    | Ping
    | Pong
    | Submit
    | Abort
    | Echo
    | Tokens
    | Rejected
    | Reserve
    | Reserved
    | Commit
    | MakeSpare
    | Release
    | FormBatch
    | FindNear
    | Candidates
    | Prefill
    | Stage
    | Unstage
    | Offer
    | Coming
    | Evict
    | TakeRole
    | PrefillReport
    | DecodeReport
    | Gone
    | Failed
    | PoolUse
    | AskCluster
    | Cluster
    | Load
    | Drain
    | Stop
    | Membership
    | GatewayNews
    | Retire
    | Attainment
)
