"""What crosses a process boundary: small records of ids, ints and bytes, msgpack on the wire.

The router is the hub. Every other process opens one connection to it, says `Hello`, and from then on sends events and
receives orders; an order is obeyed once, in the order of arrival. New things are sent whole once, then differences.
Decoding checks every field's type (`msgspec`), in one place: `alignedserve/protocol`.

Words: a request's `tokens` are its prompt and what it has generated; the KV of the first `num_cached` of them exists;
`blocks` are ids of blocks in the pool's segment, in the order of the tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec

from alignedserve.sampling_params import SamplingParams
from alignedserve.timing.cost import CostModel
from alignedserve.timing.deadlines import Deadlines
from alignedserve.types import Epoch, InstanceId, PoolBlockId, RequestKey

# who connects to the router; "launcher" is the command that started the others
# a colocated instance does what prefill and decode instances do
ROLES = ("kvpool", "prefill", "decode", "colocated", "gateway", "launcher")


class Message(msgspec.Struct, tag=True, array_like=True):
    """Fields may be added at the end, with a default."""


# ---- connections ----------------------------------------------------------------------------------------------------


class Hello(Message):
    """First message of every process to the router, once both have proved that they know the cluster's token."""

    # one of ROLES
    role: str
    instance_id: InstanceId
    epoch: Epoch
    pid: int
    # what has to be the same everywhere: model, dtype, block format, ... A difference is refused by name.
    fingerprint: dict[str, str]
    # of an instance: its limits, see InstanceLimits. Of a pool: its blocks.
    limits: InstanceLimits
    # of a pool: its segment, and what was in it when it re-attached
    segment: str = ""
    inventory: list[Stored] = []
    # of a prefill instance: "host:port" where staged KV is pulled from, if its link is not the pool's memory
    link: str = ""
    # of an instance: how long its iterations take, if that is known
    cost: CostModel | None = None


class InstanceLimits(Message):
    num_blocks: int = 0
    block_size: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_model_len: int = 0
    # of a prefill instance: how many of its blocks may hold candidates of decode instances
    num_staging_blocks: int = 0
    block_bytes: int = 0
    # prompts that begin like earlier ones reuse their KV
    enable_prefix_caching: bool = False
    # tokens of one request in one iteration of a colocated instance; 0: as many as of all
    max_prefill_chunk: int = 0


class Stored(Message):
    """A request's KV in the pool."""

    key: RequestKey
    blocks: list[PoolBlockId]
    num_tokens: int


class Welcome(Message):
    router_epoch: Epoch
    # if the router says nothing for so long, it hangs; 0: it may be silent
    silence_s: float = 0.0


class UsePool(Message):
    """To instances, when they connect and when a pool does: the segment to map. All orders before it are void."""

    segment: str


class Refused(Message):
    """The router closes the connection after this."""

    reason: str


class Ping(Message):
    """From the router, now and then; answered by Pong. Both are the wire's own affair (alignedserve/protocol)."""


class Pong(Message):
    pass


# ---- gateway to router ----------------------------------------------------------------------------------------------


class Request(Message):
    """Everything that has to be known to run a request anywhere, at any time, again."""

    # chosen by the gateway; random, so that it stays unique over all gateways and restarts
    key: RequestKey
    prompt: list[int]
    params: SamplingParams
    # the noise of the request's token k is a function of (seed, k)
    seed: int
    # of time.monotonic() on the gateway's host, or of the simulation: only their order says something elsewhere
    arrival_s: float
    # first token due so long after arrival; None: when it comes
    ttft_s: float | None = None
    # each further token due so long after the one before
    tbt_s: float | None = None
    # "rt": a person waits for each token; "be": best effort, all of it due at `deadline_s`, if that is
    # given: on the same clock
    tier: str = "rt"
    deadline_s: float | None = None
    # of the HTTP call that it is part of, for logs; empty: of none
    request_id: str = ""
    # of "ttft_s" and "tbt_s", what is the operator's default: what the model can't do alone is raised, not refused
    slo_defaults: list[str] = []
    # it shares KV only with requests that have the same
    cache_salt: str = ""


class Submit(Message):
    request: Request
    # tokens that the client has already (after a router's death): they are not sent again
    delivered: list[int] = []
    # output tokens that it will have, the delivered ones included, as far as can be foreseen; 0: unknown
    predicted_len: int = 0
    # since its arrival (of a call, its first byte), on the gateway's clock: so its deadlines get onto the router's
    waited_s: float = 0.0


class Abort(Message):
    """From a gateway: nobody waits for this request any more. From the router: forget it, whatever its state."""

    key: RequestKey


class Echo(Message):
    """From a gateway, and back as it is: what was sent before it has been taken."""

    ticket: int


# ---- router to gateway ----------------------------------------------------------------------------------------------


class NewTokens(Message):
    key: RequestKey
    # the number of output tokens before these: repeated ones are recognised by it
    first: int
    tokens: list[int]
    # the same number as tokens, where asked for: (logprob, rank, {token: logprob}) each
    logprobs: list[Any] = []
    # "stop", "length", "abort", "error", or None while it goes on
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    # with the first token, where asked for: see alignedserve/protocol/prompt_logprobs.py
    prompt_logprobs: bytes = b""
    # with the first token: tokens of the prompt whose KV was there, of earlier prompts that begin alike
    num_reused: int = 0


class Tokens(Message):
    """What one report brought, all requests of this gateway together."""

    news: list[NewTokens]
    # of those with their first tokens or their last, and of those that the gateway has aborted: (state, seconds since
    # the router took the request) for each state that it has entered
    timelines: dict[RequestKey, list[tuple[str, float]]] = {}


class Rejected(Message):
    """The request was not taken."""

    key: RequestKey
    # "full" (try again), "too_long" (it can never fit), "duplicate",
    # "slo" (the model can't be so fast)
    reason: str
    message: str


# ---- router to pool, and back ---------------------------------------------------------------------------------------


class Reserve(Message):
    """Blocks for the KV of `num_tokens` tokens, those that the request has already included. Lapses at a deadline."""

    key: RequestKey
    num_tokens: int
    # see Request
    request_id: str = ""


class Reserved(Message):
    """Also sent without a Reserve, about a request whose reservation has lapsed: no blocks, and itself dropped."""

    key: RequestKey
    # all of the request's blocks; None: no room, nothing changed
    blocks: list[PoolBlockId] | None
    # nothing is left of these: spare copies that had to go for it
    dropped: list[RequestKey] = []


class Commit(Message):
    """The KV of the first `num_tokens` tokens is in the request's blocks, and this is its authoritative copy."""

    key: RequestKey
    num_tokens: int
    # admitted to a decode instance by then, if it can be
    due_s: float
    # False: keep it, but form no batches with it
    is_candidate: bool = True


class MakeSpare(Message):
    """The KV lives in a decode instance now: this copy may go when room is needed."""

    keys: list[RequestKey]


class Release(Message):
    keys: list[RequestKey]


class FormBatch(Message):
    decode: InstanceId
    max_blocks: int
    min_requests: int
    max_requests: int
    # a range of lengths that yields no batch for so long goes before denser ones
    starvation_s: float = 2.0


class FindNear(Message):
    """Candidates whose length lies within low .. high, nearest to the middle first."""

    decode: InstanceId
    low: int
    high: int
    max_blocks: int
    max_requests: int


class Candidates(Message):
    """Answers FormBatch and FindNear. Those named are candidates no longer, until they are committed again."""

    decode: InstanceId
    keys: list[RequestKey]
    # True: a batch, to run next; False: requests that belong with the batch running now
    is_batch: bool


# ---- router to instances --------------------------------------------------------------------------------------------


class Work(Message):
    """A request, as an instance needs it to go on with it."""

    request: Request
    # output so far
    output: list[int]
    num_cached: int
    # pool blocks; those of the cached tokens first
    blocks: list[PoolBlockId]
    deadlines: Deadlines = Deadlines()
    # output tokens in all, as far as can be foreseen; 0: unknown
    predicted_len: int = 0


class Prefill(Message):
    """Load the cached tokens' KV, compute the rest in chunks, save what is new to the pool, sample a token."""

    works: list[Work]


class Stage(Message):
    """Load the KV of these into the buffer for candidates of a decode instance, from where it will pull them."""

    decode: InstanceId
    works: list[Work]


class Unstage(Message):
    """Their place in the buffer is free again."""

    keys: list[RequestKey]


class Offer(Message):
    """Candidates of a decode instance: it admits them when it has room, the batch once no candidate request is left."""

    works: list[Work]
    is_batch: bool
    # the prefill instance that has staged them; None: fetch them from the pool
    source: InstanceId | None = None
    # the source's `Hello.link`
    address: str = ""


class Coming(Message):
    """Real time that a decode instance will be offered in a moment: it had better be at an iteration's end then."""

    # their prompts are being computed
    num_prefilling: int
    # they have their first token, and their KV is on its way to the pool
    num_ready: int


class Evict(Message):
    """Save the request's KV to these pool blocks (the first `num_saved` tokens are there already), and leave it."""

    key: RequestKey
    blocks: list[PoolBlockId]
    num_saved: int


# ---- instances to router --------------------------------------------------------------------------------------------


class Moved(Message):
    """KV that was copied."""

    # "save", "load", "pull"
    what: str
    num_bytes: int
    # that copies took, one after the other
    seconds: float


class PrefillReport(Message):
    """What an iteration of a prefill instance did."""

    news: list[NewTokens]
    # requests whose KV is in the pool entirely, and of how many tokens
    saved: list[tuple[RequestKey, int]]
    # requests whose KV is in the buffer
    staged: list[RequestKey]
    # (request, computed tokens) of those that go on
    progress: list[tuple[RequestKey, int]]
    num_free_blocks: int
    duration_s: float = 0.0
    # since the last report
    moved: list[Moved] = []
    # of iterations, measured over predicted
    pace: float = 1.0
    # tokens whose KV was computed since the last report
    num_computed: int = 0
    # tokens of prompts that started since then, and those of them whose KV was there, of earlier prompts
    num_asked: int = 0
    num_found: int = 0


class DecodeReport(Message):
    """What an iteration of a decode instance did; also sent, without news, when anything below changes between two."""

    news: list[NewTokens]
    admitted: list[RequestKey]
    # asks for Evict orders; these requests may stand still until they come
    wants_evicted: list[RequestKey]
    # (request, tokens whose KV is in the pool now)
    evicted: list[tuple[RequestKey, int]]
    num_free_blocks: int
    num_running: int
    # of the running batch
    max_length: int
    sum_lengths: int
    duration_s: float = 0.0
    min_length: int = 0
    # since the last report
    moved: list[Moved] = []
    # of iterations, measured over predicted
    pace: float = 1.0
    # blocks that best-effort requests hold
    num_be_blocks: int = 0
    num_be_running: int = 0
    # tokens whose KV was computed since the last report
    num_computed: int = 0
    # A colocated instance says these as a prefill instance does: see PrefillReport.
    progress: list[tuple[RequestKey, int]] = []
    num_asked: int = 0
    num_found: int = 0


class Gone(Message):
    """Answers Abort, always: nothing is left of these here, and nobody reads or writes their pool blocks any more."""

    keys: list[RequestKey]


class Failed(Message):
    """A transfer did not happen. The request's KV at the source is untouched."""

    key: RequestKey
    # "load", "save", "pull", "evict"
    what: str
    reason: str


# ---- about the cluster itself; between gateways, the launcher, and the router's shell --------------------------------


class PoolUse(Message):
    """From a pool, when it has changed."""

    num_free_blocks: int
    # held by spare copies: free as soon as they are needed
    num_spare_blocks: int


class AskCluster(Message):
    """Answered by Cluster."""

    # comes back with the answer
    ticket: int


class InstanceStats(Message):
    """Counts go on when the instance is started again, and begin anew with the router."""

    # requests that had to leave the running batch; of these, whose KV was kept
    num_preemptions: int = 0
    num_evictions: int = 0
    # staged copies that were given up before the request was admitted
    num_spills: int = 0
    # offered batches from which something was admitted
    num_batch_switches: int = 0
    # of the running batch
    min_length: int = 0
    max_length: int = 0
    # in the buffer for candidates
    staged_bytes: int = 0
    moved: list[Moved] = []
    # tokens whose KV was computed, and the time of the iterations that did it
    num_computed_tokens: int = 0
    computing_s: float = 0.0
    # tokens of prompts, and those of them whose KV was there, of earlier prompts
    num_asked_tokens: int = 0
    num_found_tokens: int = 0


class Part(Message):
    """A process, as the router knows it."""

    role: str
    instance_id: InstanceId
    epoch: Epoch
    pid: int
    # "up", or "down": it was there and is expected back
    state: str
    num_blocks: int
    num_free_blocks: int
    # that it has: state -> number of requests
    requests: dict[str, int]
    stats: InstanceStats = msgspec.field(default_factory=InstanceStats)


class Cluster(Message):
    """Answers AskCluster; also sent to launchers, with ticket 0, whenever a process comes or goes."""

    ticket: int
    parts: list[Part]
    # of the whole island: state -> number of requests
    requests: dict[str, int]
    # the same by tier
    tiers: dict[str, dict[str, int]] = {}
    # role of a process that was lost -> requests that went on without it, since the router started
    recoveries: dict[str, int] = {}
    # how classes shared: "demoted" (real time that could not make it any more), "express" (real time that went to a
    # decode instance at once), "evicted_for_rt" (best effort that left one meanwhile), "recomputed" (KV thrown away)
    sharing: dict[str, int] = {}


class Drain(Message):
    """From a launcher, passed on to gateways: take nothing new, finish what runs, and then end."""


class Stop(Message):
    """From a launcher: the system shuts down. The router passes it on to everyone, and then stops itself."""


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
    | PrefillReport
    | DecodeReport
    | Gone
    | Failed
    | PoolUse
    | AskCluster
    | Cluster
    | Drain
    | Stop
)
