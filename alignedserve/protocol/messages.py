"""The messages that cross a process boundary: small records of ids, ints and bytes, as msgpack on the wire.

The router is the hub. Every other process opens one connection to it and sends `Hello`. It then sends events and
receives orders. It obeys each order once, in the order of arrival. State is sent once as a whole and afterwards as
changes. `msgspec` checks the type of every field when it decodes; only `alignedserve/protocol` decodes.

A request's `tokens` are its prompt and the tokens generated so far. The KV of the first `num_cached` of them exists.
`blocks` are ids of blocks in the pool's segment, in the order of the tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from alignedserve.kv.span import TILE_TOKENS, KvSpan
from alignedserve.sampling_params import SamplingParams
from alignedserve.timing.cost import CostModel
from alignedserve.timing.deadlines import Deadlines
from alignedserve.types import Epoch, InstanceId, PoolBlockId, RequestKey
from alignedserve.version import __version__

# The roles of the processes that connect to the router. "launcher" is the command that started the others. A colocated
# instance does the work of both prefill and decode instances.
ROLES = ("kvpool", "prefill", "decode", "colocated", "gateway", "launcher")
# Roles between which an instance may change: see TakeRole.
ROLES_THAT_CHANGE = (PREFILL, DECODE) = ("prefill", "decode")
# The seconds after which a gateway first submits a rejected request again, and how often they double.
RESUBMIT_S, MAX_DOUBLED = 0.25, 4


class Message(msgspec.Struct, tag=True, array_like=True):
    """Base of all messages. Fields may be added at the end, with a default."""


# ---- connections ----------------------------------------------------------------------------------------------------


class Hello(Message):
    """The first message of every process to the router, once both have proved that they know the cluster's token. An
    instance that has taken another role sends it again: see TakeRole."""

    # One of ROLES.
    role: str
    instance_id: InstanceId
    epoch: Epoch
    pid: int
    # Settings that must be the same everywhere: model, dtype, block format, ... If one differs, the router refuses the
    # process and names the setting.
    fingerprint: dict[str, str]
    # An instance's limits. For a pool: the number and size of its blocks, each a whole column, and the window that
    # instances keep.
    limits: InstanceLimits
    # A pool's segment, and the KV that was in it when the pool attached to it.
    segment: str = ""
    inventory: list[Stored] = []
    # "host:port" from which decode instances pull a prefill instance's staged KV; empty if they read the pool's memory.
    link: str = ""
    # How long an instance's iterations take, if known.
    cost: CostModel | None = None
    # When the process was started: seconds since 1970 on its host's wall clock, for humans.
    started_s: float = 0.0
    # The version of AlignedServe that it runs. Another process may run another one: see versions.py.
    version: str = __version__
    # Whether a pool knew the content of any block when it attached to its segment.
    knows_content: bool = False


class InstanceLimits(Message):
    num_blocks: int = 0
    block_size: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_model_len: int = 0
    # Blocks of a prefill instance that may hold staged KV for decode instances.
    num_staging_blocks: int = 0
    block_bytes: int = 0
    # Whether prompts reuse the KV of earlier prompts with the same prefix.
    enable_prefix_caching: bool = False
    # The most tokens of one request in one iteration of a colocated instance; 0: only the limit for all requests
    # applies.
    max_prefill_chunk: int = 0
    # Blocks of restored KV. An iteration runs no more requests with kept inputs than fit into them. 0: no request keeps
    # inputs.
    max_restored_blocks: int = 0
    # Latest tokens for which sliding groups hold blocks; 0: all.
    window: Annotated[int, Meta(ge=0)] = 0
    # See LayerGroups.
    num_full_groups: Annotated[int, Meta(ge=0)] = 0
    num_sliding_groups: Annotated[int, Meta(ge=1)] = 1
    # Blocks of sliding groups are freed in steps of this many tokens: see kv/span.py.
    tile_tokens: Annotated[int, Meta(ge=1)] = TILE_TOKENS
    # A prefill instance: whether it saves all blocks of its columns, also with a window. A pool: whether it lets
    # requests find only such columns (`Commit.first_whole`).
    saves_whole: bool = False
    # An instance's places for adapters that are loaded while it runs; 0: it loads them only when it starts.
    num_adapter_places: Annotated[int, Meta(ge=0)] = 0
    # Whether sliding groups have states: see LayerGroups.
    has_state: bool = False

    @property
    def can_keep_inputs(self) -> bool:
        return self.max_restored_blocks > 0

    @property
    def span(self) -> KvSpan:
        return self._span(self.max_num_batched_tokens)

    @property
    def num_kv_tokens(self) -> int:
        """The number of tokens for which there are blocks, if nothing is passed."""
        return self.num_blocks // (self.num_full_groups + self.num_sliding_groups) * self.block_size

    def num_tokens_of(self, length: int) -> int:
        """Returns the number of tokens for which there are blocks, if all requests decode at this length."""
        span, num_columns = self.decode_span, -(-max(length, 1) // self.block_size)
        num_blocks = span.num_held(max(length - 1, 0), max(length, 1))
        return self.num_blocks * num_columns // num_blocks * self.block_size

    @property
    def max_request_blocks(self) -> int:
        """The most blocks of a request that computes one token at a time."""
        span = self.decode_span
        return span.num_at_most(span.num_columns(self.max_model_len))

    @property
    def decode_span(self) -> KvSpan:
        """The span of a request that computes one token at a time."""
        return self._span(1)

    def _span(self, max_step: int) -> KvSpan:
        return _span_of(
            self.block_size,
            self.window,
            max_step,
            self.num_full_groups,
            self.num_sliding_groups,
            self.tile_tokens,
            self.has_state,
        )


# Policies read the spans of the same few limits at each event.
_span_of = lru_cache(maxsize=256)(KvSpan)


class Stored(Message):
    """A request with KV in the pool, and its blocks."""

    key: RequestKey
    blocks: list[PoolBlockId]
    num_tokens: int
    # Whether other requests had left that KV, and an instance may still be filling the other blocks.
    is_new: bool = False


class Welcome(Message):
    router_epoch: Epoch
    # Seconds without a message after which the router counts as hanging; 0: it may be silent.
    silence_s: float = 0.0


class UsePool(Message):
    """Sent to instances when they connect and when a pool does. Orders them to map this segment. All earlier orders are
    void."""

    segment: str


class Refused(Message):
    """The router closes the connection after this message."""

    reason: str


class Ping(Message):
    """The router pings each process regularly, and the process answers with Pong. `alignedserve/protocol` does both."""


class Pong(Message):
    pass


# ---- gateway to router ----------------------------------------------------------------------------------------------


class Request(Message):
    """Everything needed to run a request, or to run it again, on any instance."""

    # The gateway draws it at random, so it is unique across gateways and restarts.
    key: RequestKey
    prompt: list[int]
    params: SamplingParams
    # The sampling noise of the request's token k is a function of (seed, k).
    seed: int
    # The time of arrival, by time.monotonic() on the gateway's host or in a simulation. In other processes only its
    # order counts.
    arrival_s: float
    # Seconds from arrival until the first token is due; None: no deadline.
    ttft_s: float | None = None
    # Seconds from one token until the next is due.
    tbt_s: float | None = None
    # "rt": a person waits for each token. "be": best effort, due as a whole at `deadline_s`, if given, by the clock of
    # `arrival_s`.
    tier: str = "rt"
    deadline_s: float | None = None
    # The id of the HTTP call that the request is part of, for logs; empty if there is none.
    request_id: str = ""
    # Those of "ttft_s" and "tbt_s" that are the operator's defaults. If the model can't meet a default even when alone,
    # the default is raised. The request is not refused.
    slo_defaults: list[str] = []
    # The request shares KV only with requests that have the same salt.
    cache_salt: str = ""
    # One of `pooling.POOLINGS`: the request asks for an embedding of its prompt, not for tokens. None of its KV goes to
    # the pool, nor to a decode instance. None: it asks for tokens.
    pooling: str | None = None
    # Whether the gateway receives the prompt's progress until the first token.
    reports_progress: bool = False
    # Whether no client has requested `tbt_s`, so the sooner each token comes the better. Real time only.
    hurries: bool = False
    # Whether jobs would be late at their current speed. Best effort only.
    is_pressed: bool = False
    # The name of its adapter, on which all of its KV depends; empty: none.
    adapter: str = ""
    # Whether a later prompt may well begin with this one and its answer, as the turns of a chat do.
    has_next_turn: bool = False
    # The owner of its API key; empty: no keys are needed. Owners take turns, each has a part of the router's queue, and
    # what is kept and promised to next turns is limited for each.
    owner: str = ""
    # What its next turn probably awaits, so that the pool promises it the KV: "tool" if it offers tools, "user" if it
    # only names a session; empty: nothing is promised.
    awaits: str = ""
    # Whether the prompt has the results of tools behind an earlier answer.
    brings_results: bool = False

    @property
    def is_embedding(self) -> bool:
        return self.pooling is not None

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether the whole prompt has to be computed at once, even if some of its KV exists: for its log-probabilities
        (until the first token), or for a mean of all its states."""
        return self.params.prompt_logprobs is not None or self.pooling == "mean"


class Submit(Message):
    request: Request
    # The tokens that the client received before a router died. They are not sent again.
    delivered: list[int] = []
    # The predicted number of output tokens, the delivered ones included; 0: unknown.
    predicted_len: int = 0
    # Seconds since the first byte of the call arrived, on the gateway's clock. The router computes the deadlines on its
    # own clock from it.
    waited_s: float = 0.0


class Abort(Message):
    """From a gateway: no client waits for these requests any more. From the router: drop them, whatever their state."""

    keys: list[RequestKey]


class Echo(Message):
    """A gateway sends it and the router returns it unchanged. By then the router has handled all earlier messages."""

    ticket: int


# ---- router to gateway ----------------------------------------------------------------------------------------------


# Finish reasons of complete answers.
WHOLE_ANSWERS = ("stop", "length")


class NewTokens(Message):
    key: RequestKey
    # The number of output tokens before these. Repeated tokens are recognised by it.
    first: int
    tokens: list[int]
    # One (logprob, rank, {token: logprob}) per token, if requested; otherwise empty.
    logprobs: list[Any] = []
    # "stop", "length", "abort" or "error"; None while the request runs.
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    # The packed log-probabilities of the prompt, with the first token, if requested: see
    # alignedserve/protocol/prompt_logprobs.py.
    prompt_logprobs: bytes = b""
    # With the first token: the number of prompt tokens with KV reused from earlier prompts.
    num_reused: int = 0
    # The embedding of the prompt, with the end of a request for one: see alignedserve/protocol/pooling.py.
    embedding: bytes = b""
    # Whether the request's KV may be wrong, with an error.
    is_spoilt: bool = False


class PromptProgress(Message):
    """How much of a prompt is computed. It is complete when the first token comes."""

    key: RequestKey
    # Tokens of the prompt.
    num_tokens: int
    num_computed: int
    # The number of prompt tokens with KV reused from earlier prompts. They count as computed.
    num_reused: int
    # Seconds since an instance began with it.
    seconds: float


class Tokens(Message):
    """The new tokens of all requests of this gateway in one report."""

    news: list[NewTokens]
    # For requests with their first or last token, and for requests that the gateway has aborted: (state, seconds since
    # the router took the request) for each state that the request has entered.
    timelines: dict[RequestKey, list[tuple[str, float]]] = {}
    # For requests without any tokens so far.
    progress: list[PromptProgress] = []


class Rejected(Message):
    """The router did not take the request."""

    key: RequestKey
    # "full" (try again), "owner_full" (the same, for its API key), "too_long" (it can never fit), "duplicate", "slo"
    # (the model can't be that fast), or "adapter" (it was unloaded).
    reason: str
    message: str

    def wait_s(self, num_submitted: int) -> float | None:
        """Returns the seconds after which a gateway submits the request again, if it was accepted before; None: this is
        final."""
        if num_submitted < 2 or self.reason in ("too_long", "slo", "adapter"):
            return None
        # After a restart thousands of accepted requests may be rejected at once, so the delay grows.
        return RESUBMIT_S * 2.0 ** min(num_submitted - 2, MAX_DOUBLED)


# ---- router to pool, and back ---------------------------------------------------------------------------------------


class Reserve(Message):
    """Asks for blocks for the KV of `num_tokens` tokens in all. The reservation lapses at a deadline."""

    key: RequestKey
    num_tokens: int
    # See Request.
    request_id: str = ""
    # The number of this Reserve; the router counts from 1. The answer has the same number.
    number: int = 0
    # The hashes of the request's first full blocks (`scheduling/prefixes.py`), if it may share their KV. If it has no
    # blocks yet, it gets those that the pool knows by them. Its own blocks become known when they are committed.
    hashes: list[bytes] = []
    # Whether it may take no other request's KV, not even a spare.
    is_optional: bool = False
    # For a complete answer, see Request: what its next turn awaits.
    awaits: str = ""
    # See Request. Earlier versions leave it empty if nothing is awaited or follows.
    owner: str = ""
    # For a prompt that may be a next turn: what it has behind the answer before it, "tool" or "user". Empty: unknown.
    follows: str = ""
    # Whether it only takes the blocks that are known by its hashes, or that it has already, and no free ones. It is
    # never refused: if nothing is found, the answer has no blocks, and the request has none.
    finds_only: bool = False


class Reserved(Message):
    """Answers Reserve. It is also sent unasked when a reservation has lapsed: `blocks` is None, and `dropped` names the
    request."""

    key: RequestKey
    # All of the request's blocks; None: there is no room, and nothing has changed.
    blocks: list[PoolBlockId] | None
    # Requests that have nothing left in the pool: their spare copies were dropped to make room.
    dropped: list[RequestKey] = []
    # The number of the Reserve that it answers; 0: it was sent unasked.
    number: int = 0
    # The number of the request's first tokens with KV in these blocks.
    num_tokens: int = 0
    # The number of them with KV that was found by the hashes.
    num_found: int = 0


class Commit(Message):
    """The KV of the first `num_tokens` tokens is in the request's blocks. From now on this is the authoritative
    copy."""

    key: RequestKey
    num_tokens: int
    # When the request should be admitted to a decode instance at the latest.
    due_s: float
    # False: the pool keeps the KV but forms no batches with the request.
    is_candidate: bool = True
    # Candidates of one group begin alike, and go to decode instances together. 0: this one has no group.
    prefix_group: int = 0
    # The request's own columns before this one may lack blocks of sliding groups.
    first_whole: int = 0


class MakeSpare(Message):
    """A decode instance now holds the KV of these requests. The pool may drop its copy when it needs room."""

    keys: list[RequestKey]


class Release(Message):
    keys: list[RequestKey]


class ForgetAll(Message):
    """KV that is known now may be wrong: no further request gets any of it. Requests of earlier eras make nothing known
    any more."""

    era: int


class FormBatch(Message):
    decode: InstanceId
    # Limits of the decode instance.
    max_blocks: int
    min_requests: int
    max_requests: int
    # Seconds without a batch after which a range of lengths goes before denser ones.
    starvation_s: float = 2.0
    # See Offer.
    replaces: bool = False
    # The number of candidates for each decode instance. A batch of requests that begin alike has at most as many, even
    # if there is room for more.
    fair_share: int = 0


class FindNear(Message):
    """Asks for candidates with a length within low .. high, the nearest to the middle first."""

    decode: InstanceId
    low: int
    high: int
    # Limits of the decode instance.
    max_blocks: int
    max_requests: int
    # The number of the running batch, which these requests are meant to join. The answer has the same number.
    batch: int = 0


class Candidates(Message):
    """Answers FormBatch and FindNear. These requests are no longer candidates until they are committed again."""

    decode: InstanceId
    keys: list[RequestKey]
    # True: they are the batch to run next. False: they join the batch that runs now.
    is_batch: bool
    # See FindNear.
    batch: int = 0
    # See Offer.
    replaces: bool = False


# ---- router to instances --------------------------------------------------------------------------------------------


class Work(Message):
    """A request, with everything that an instance needs to continue it."""

    request: Request
    # The output tokens so far.
    output: list[int]
    num_cached: int
    # The request's pool blocks, those of the cached tokens first.
    blocks: list[PoolBlockId]
    deadlines: Deadlines = Deadlines()
    # The predicted number of output tokens in all; 0: unknown.
    predicted_len: int = 0
    # The number of its first tokens with KV that other requests had left in the pool.
    num_found: int = 0
    # Whether it shares no KV, because that of its prompt may be wrong.
    is_alone: bool = False
    # The router's era when the request had no KV yet. Each ForgetAll begins a new one.
    era: int = 0

    @property
    def is_first(self) -> bool:
        """Whether no instance has computed anything of it yet, as far as is known."""
        return not self.output and self.num_cached <= self.num_found


class Prefill(Message):
    """Order: load the KV of the cached tokens, compute the rest in chunks, save the new KV to the pool, and sample a
    token."""

    works: list[Work]


class Stage(Message):
    """Order: load the KV of these requests into the staging buffer. The decode instance will pull it from there."""

    decode: InstanceId
    works: list[Work]


class Unstage(Message):
    """Order: free the blocks of these requests in the staging buffer. For prompts that are held (see PrefillReport),
    free them once their KV is in the pool."""

    keys: list[RequestKey]


class Offer(Message):
    """Offers requests to a decode instance. It admits them when it has room: candidate requests first, then the
    batch."""

    works: list[Work]
    is_batch: bool
    # The prefill instance that has staged their KV, or that holds the blocks in which it computed the KV. None: the KV
    # is loaded from the pool.
    source: InstanceId | None = None
    # The source's `Hello.link`.
    address: str = ""
    # The number of the batch that they belong to, which may come in several parts; 0: none. The router numbers a decode
    # instance's batches from 1.
    batch: int = 0
    # Whether this batch replaces those with smaller numbers. Otherwise it runs beside them.
    replaces: bool = False


# Under its first name, so that versions understand each other.
class AnnounceRt(Message, tag="Coming"):
    """Announces real-time requests that the decode instance will be offered soon, so that it starts no long iteration
    now."""

    # Announced requests with a prompt that is being computed.
    num_prefilling: int
    # Announced requests that have their first token, and KV on its way to the pool.
    num_ready: int


class Evict(Message):
    """Order: save the request's KV to these pool blocks and drop the request, which runs or has ended
    (`DecodeReport.ended`). The KV of the first `num_saved` tokens is there already."""

    key: RequestKey
    blocks: list[PoolBlockId]
    num_saved: int


class TakeRole(Message):
    """Order: act as a prefill or a decode instance from now on. It is sent only when the instance has nothing left to
    do. The instance answers with another Hello on the same connection. Orders resume after the Welcome for that."""

    role: str


# ---- instances to router --------------------------------------------------------------------------------------------


class Moved(Message):
    """How much KV was copied, and how long that took."""

    # "save", "load" or "pull"; with blocks shared from both ends also "checkpoint" or "restore".
    what: str
    num_bytes: int
    # The sum of the durations of the copies.
    seconds: float
    # The pool's blocks that were compared with their checksums, and those found to have changed.
    num_checked: int = 0
    num_changed: int = 0


class PrefillReport(Message):
    """The events of one iteration of a prefill instance."""

    news: list[NewTokens]
    # Requests with all of their KV in the pool, and the number of their tokens.
    saved: list[tuple[RequestKey, int]]
    # Requests with KV in the staging buffer.
    staged: list[RequestKey]
    # (request, number of computed tokens, number of those with KV reused from earlier prompts) for requests with an
    # unfinished prompt.
    progress: list[tuple[RequestKey, int, int]]
    num_free_blocks: int
    duration_s: float = 0.0
    # The copies since the last report.
    moved: list[Moved] = []
    # The ratio of measured to predicted iteration time.
    pace: float = 1.0
    # Tokens with KV computed since the last report.
    num_computed: int = 0
    # Tokens of the requests that started since the last report, and how many of them were in the prefix cache.
    num_asked: int = 0
    num_found: int = 0
    # Real-time requests with a prompt that was just computed. Decode instances may pull their KV from where it is,
    # while it is copied to the pool. It is held until one has pulled it, or Unstage arrives.
    held: list[RequestKey] = []

    @classmethod
    def empty(cls) -> PrefillReport:
        return cls([], [], [], [], 0)


class FailedPull(Message):
    """A transfer from a prefill instance failed, because of the link or one of its ends. A request that is no longer
    staged there is not a failure."""

    source: InstanceId
    keys: list[RequestKey]
    reason: str


class DecodeReport(Message):
    """The events of one iteration of a decode instance. It is also sent, without tokens, when any other field
    changes."""

    news: list[NewTokens]
    admitted: list[RequestKey]
    # Requests for which the instance asks for Evict orders. They may stand still until these arrive.
    wants_evicted: list[RequestKey]
    # (request, number of tokens with KV in the pool now).
    evicted: list[tuple[RequestKey, int]]
    num_free_blocks: int
    num_running: int
    # Lengths of all running requests, in tokens.
    max_length: int
    sum_lengths: int
    duration_s: float = 0.0
    min_length: int = 0
    # The copies since the last report.
    moved: list[Moved] = []
    # The ratio of measured to predicted iteration time.
    pace: float = 1.0
    # Blocks that best-effort requests hold.
    num_be_blocks: int = 0
    num_be_running: int = 0
    # Tokens with KV computed since the last report.
    num_computed: int = 0
    # Filled by a colocated instance, as by a prefill instance: see PrefillReport.
    progress: list[tuple[RequestKey, int, int]] = []
    num_asked: int = 0
    num_found: int = 0
    # The running batch: the latest one from which a request was admitted; 0: none yet.
    batch: int = 0
    # Lengths of the running requests that belong to it, in tokens; 0: there are none.
    batch_min_length: int = 0
    batch_max_length: int = 0
    # Whether requests of several batches ran, or requests of a batch beside requests of none.
    is_mixed: bool = False
    # Seconds between the last iteration and this one, including copies that it waited for; None: there was nothing to
    # compute.
    scheduling_s: float | None = None
    # Recent seconds per iteration in which the engine computes nothing.
    outside_s: float = 0.0
    # Requests that the instance has dropped with their KV. Their KV has to be computed again.
    dropped: list[RequestKey] = []
    # The ratio of measured to predicted time of the last iteration.
    overrun: float = 1.0
    failed_pulls: list[FailedPull] = []
    # Tokens with KV in the pool or at a prefill instance, of the requests that were admitted since the last report, and
    # how many of them were not copied because their KV was here.
    num_arriving: int = 0
    num_not_copied: int = 0
    # Requests with a complete answer that still hold their blocks, so that the pool can have their KV. The instance
    # waits for Evict or Abort.
    ended: list[RequestKey] = []

    @classmethod
    def empty(cls) -> DecodeReport:
        return cls([], [], [], [], 0, 0, 0, 0)


class Gone(Message):
    """Answers every Abort. The instance has nothing left of these requests, and no longer reads or writes their pool
    blocks."""

    keys: list[RequestKey]


class Failed(Message):
    """A transfer did not take place. The request's KV at the source is unchanged."""

    key: RequestKey
    # "load", "save", "pull" or "evict".
    what: str
    reason: str
    # The first block of the pool with bytes other than those saved. The same load would fail again.
    wrong_block: PoolBlockId | None = None


# ---- about the cluster itself; between gateways, the launcher, and the router's shell --------------------------------


# The share of the pool's blocks that is promised at most to the next turns of all chats.
MAX_PROMISED_SHARE = 0.5


class PoolUse(Message):
    """A pool sends it when its use has changed."""

    num_free_blocks: int
    # The blocks of spare copies and kept ones, which become free as soon as they are needed.
    num_spare_blocks: int
    # Those of them that no request lists: their KV is kept for prompts that begin alike.
    num_kept_blocks: int = 0
    # Blocks that several requests list.
    num_shared_blocks: int = 0
    # The kept ones that are promised to next turns, and what became of promises: see ReturnTimes.
    num_promised_blocks: int = 0
    promises: dict[str, int] = {}


class ResetPrefixCache(Message):
    """From a gateway: no further request gets KV that is kept now. The router sends it back when it has ordered that
    (`ForgetAll`)."""

    # The answer has the same ticket.
    ticket: int


class AskCluster(Message):
    """Asks the router for Cluster."""

    # The answer has the same ticket.
    ticket: int


# Upper bounds of the histogram buckets for scheduling times, in seconds.
SCHEDULING_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class InstanceStats(Message):
    """An instance's counters. They continue when the instance is restarted, and start at zero with the router."""

    # Requests that had to leave the running batch, and how many of them kept their KV.
    num_preemptions: int = 0
    num_evictions: int = 0
    # Staged copies that were dropped before the request was admitted.
    num_spills: int = 0
    # Offered batches from which a request was admitted.
    num_batch_switches: int = 0
    # Iterations since the first batch ran, and how many of them had requests of several batches, or of a batch and of
    # none.
    num_batch_iterations: int = 0
    num_mixed_iterations: int = 0
    # Iterations with a scheduling time in each bucket of SCHEDULING_S, and above the last; then the sum of these times
    # in seconds.
    scheduling: list[int] = []
    scheduling_s: float = 0.0
    # Lengths of all running requests, in tokens.
    min_length: int = 0
    max_length: int = 0
    # Bytes of KV in the staging buffer.
    staged_bytes: int = 0
    moved: list[Moved] = []
    # Tokens with KV computed, and the seconds of the iterations that computed them.
    num_computed_tokens: int = 0
    computing_s: float = 0.0
    # Tokens of the requests that started, and how many of them were in the prefix cache.
    num_asked_tokens: int = 0
    num_found_tokens: int = 0
    # Failed transfers from prefill instances: see FailedPull.
    num_failed_pulls: int = 0
    # Prefill instances that send their KV to this one through host memory, because pulls from them have failed.
    over_host: list[InstanceId] = []
    # Requests with KV that decode instances pulled from where this instance had just computed it.
    num_handed_over: int = 0
    # Tokens with KV of the admitted requests, and how many of them were not copied because their KV was here.
    num_arriving_tokens: int = 0
    num_not_copied_tokens: int = 0
    # Blocks loaded from the pool that were compared with their checksums, and those found to have changed.
    num_checked_blocks: int = 0
    num_changed_blocks: int = 0


class ProcessStatus(Message):
    """The router's view of a process."""

    role: str
    instance_id: InstanceId
    epoch: Epoch
    pid: int
    # "up"; or "down": it was connected and is expected back.
    state: str
    num_blocks: int
    num_free_blocks: int
    # The number of the process's requests in each state.
    requests: dict[str, int]
    stats: InstanceStats = msgspec.field(default_factory=InstanceStats)
    # See Hello.
    started_s: float = 0.0
    # What it uses (see process/usage.py), if it runs on the router's host for certain; otherwise 0.
    cpu_s: float = 0.0
    resident_bytes: int = 0
    # A pool's: see PoolUse. Kept blocks count as free.
    num_kept_blocks: int = 0
    num_shared_blocks: int = 0
    num_promised_blocks: int = 0
    promises: dict[str, int] = {}


class Cluster(Message):
    """Answers AskCluster. It is also sent to launchers, with ticket 0, whenever a process connects or disconnects."""

    ticket: int
    processes: list[ProcessStatus]
    # The number of requests in each state, in the whole island.
    requests: dict[str, int]
    # The same for each tier.
    tiers: dict[str, dict[str, int]] = {}
    # For each role: requests that continued after a process was lost, since the router started.
    recoveries: dict[str, int] = {}
    # Counts of what the tiers do to each other. "demoted": real time that could not meet its objective any more.
    # "express": real time on the RT fast path, from the pool. "evicted_for_rt": best effort that was evicted for real
    # time. "recomputed": requests with KV that was thrown away.
    sharing: dict[str, int] = {}
    # For each role: how often an instance changed to it since the router started.
    role_changes: dict[str, int] = {}
    # How often a gateway had the prefix cache reset since the router started.
    num_cache_resets: int = 0


class Load(Message):
    """From the router to gateways and the launcher, several times a second: the load of the island."""

    num_requests: int
    # The share of the last seconds in which instances computed: the mean over instances of the busier role.
    busy: float
    # Prompt tokens left to compute, for real time and in total.
    num_rt_tokens: int = 0
    num_tokens: int = 0
    # Instances that compute prompts, and instances that decode.
    num_prefills: int = 0
    num_decodes: int = 0
    # Prompt tokens that one instance computes per second; 0: unknown.
    tokens_per_s: float = 0.0
    # Whether real time would have to wait for a place to decode.
    is_full: bool = False
    # Tokens in the instances' prefix caches; 0: none.
    num_cache_tokens: int = 0


class Drain(Message):
    """From a launcher, passed on to gateways: take no new requests, finish those that run, and then exit."""


class Retire(Message):
    """From the launcher to a gateway that was replaced: accept no more connections, and exit when all open ones are
    closed."""


class Stop(Message):
    """From a launcher: the system shuts down. The router sends it on to all processes, and then stops."""


class IslandAt(Message):
    """The address of an island's router. The system's token is the same everywhere."""

    # Unique among all islands that this system has ever had.
    number: int
    host: str
    port: int
    # See RouterAddress.
    path: str | None = None
    # Whether the island is being removed: new requests go to other islands while there are any.
    is_leaving: bool = False


class Membership(Message):
    """From the launcher to gateways, when they connect and at every change: the islands that exist."""

    islands: list[IslandAt]
    # What should exist and does not, one line each, for humans.
    missing: list[str] = []
    # The number of islands that the traffic would need, whatever the limit is; 0: unknown.
    num_wanted: int = 0


class ApiKeys(Message):
    """From the launcher to gateways, when they connect and whenever the list changes, if the system has API keys."""

    # The owners by the keys' digests (see gateway/http/keys.py). It is never empty.
    owners: dict[bytes, str]


class Attainment(Message):
    """From a gateway to the launcher, when it begins to serve and every second: how many objectives were met since the
    last message."""

    # Real-time requests. A request that was refused because the queue was full counts as missed.
    num_met: int
    num_missed: int
    # Whether batch jobs would be late at their current speed.
    are_late: bool
    # Whether the gateway accepts connections of clients. Earlier versions don't say so.
    is_serving: bool = True


class AdapterAt(Message):
    """An adapter that was loaded while the system runs."""

    # See `engine/lora_modules.py`.
    adapter: str
    # The directory of its files, which do not change.
    path: str


class SetAdapters(Message):
    """Order: have these adapters, beside none that was loaded before. The launcher sends it to routers, when they
    connect and at every change, and a router to its instances. An instance that has just connected obeys the first
    one before it does anything else."""

    # Each order has a higher number than those before it.
    number: int
    adapters: list[AdapterAt]


class AdaptersSet(Message):
    """Answers SetAdapters: from an instance to its router; and from a router to the launcher, when all of its
    instances that are connected have answered."""

    # That of the order.
    number: int
    # Why an adapter could not be loaded; empty: all are there.
    reason: str = ""
    # From a router: adapters that instances still have because requests use them. It answers again without them.
    kept: list[str] = []


class ServedAdapters(Message):
    """From the launcher to gateways, when they connect and at every change: the adapters that clients may name. The
    gateway sends it back when it serves them."""

    number: int
    # The adapters by the names that clients use.
    adapters: dict[str, str]


class ChangeAdapters(Message):
    """From a gateway to the launcher: an operator's call loads or unloads an adapter."""

    # The answer has the same ticket.
    ticket: int
    name: str
    # The directory of the adapter to load; None: unload.
    path: str | None = None
    # Whether it may take the place of another one with this name.
    is_in_place: bool = False


class AdaptersChanged(Message):
    """Answers ChangeAdapters."""

    ticket: int
    # Status of the HTTP response: 200, 400, 404 or 500.
    status: int
    reason: str = ""


class GatewayNews(Message):
    """A gateway's news for the other gateways of its host, every second. The launcher passes it on."""

    gateway: InstanceId
    # Its measurements (see gateway/telemetry/exposition.py).
    metrics: bytes
    # For each batch job: the seconds until it is done, if known, and the share of it that is done.
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
    | ForgetAll
    | FormBatch
    | FindNear
    | Candidates
    | Prefill
    | Stage
    | Unstage
    | Offer
    | AnnounceRt
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
    | ApiKeys
    | GatewayNews
    | Retire
    | Attainment
    | ResetPrefixCache
    | SetAdapters
    | AdaptersSet
    | ServedAdapters
    | ChangeAdapters
    | AdaptersChanged
)
