"""A policy's view of an instance between two iterations, and the orders that it can give there.

A policy sees counts, lengths, deadlines and predictions, but no tensors or block ids. Its calls take effect in order.
They take blocks, slots and tokens at once, so the next call sees what is left. A call that does not fit returns False,
or raises an error if the policy could have known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

from alignedserve.kv.layout import PLAIN, Layout
from alignedserve.scheduling.views import BoundaryView, RequestView

# ---- decode and colocated instances ----------------------------------------------------------------------------------


class DecodeRequest(RequestView, Protocol):
    """A request that runs, or is to run, at a decode instance. See `decode_worker/scheduled_request.py` for more."""

    # Free for the policy's own data, as long as the request is here.
    mark: Any

    @property
    def is_embedding(self) -> bool:
        """Whether it ends when its prompt is computed, without a token. Its KV can't go to the pool."""

    @property
    def batch(self) -> int:
        """The number of its batch, greater for later batches; 0: it belongs to none."""

    @property
    def num_read(self) -> int:
        """Its length for the cost model: `num_tokens`, less what others read for it."""

    @property
    def num_cached(self) -> int:
        """The number of tokens with KV here or on its way."""

    @property
    def num_pending(self) -> int:
        """The number of tokens to compute before the next one is sampled: one, unless KV was lost."""

    @property
    def num_pooled(self) -> int:
        """The number of tokens with KV in the pool as well."""

    @property
    def is_returning(self) -> bool:
        """Whether it has KV in the pool because it had to leave, and not because other prompts begin like it."""

    @property
    def num_columns(self) -> int:
        """The number of columns of its blocks (see `kv/span.py`), passed ones included."""

    @property
    def num_passed(self) -> int:
        """The number of its first columns to which no later token attends in sliding layers. It holds no blocks of
        those layers there."""

    @property
    def layout(self) -> Layout:
        """How its tokens lie in its blocks. If these hold no KV, K and V of all its earlier tokens are computed from
        them in each iteration that it runs in. It can then be dropped, but not evicted."""

    @property
    def num_brought(self) -> int:
        """The number of tokens of its answer with which it arrived here."""

    @property
    def num_left(self) -> int:
        """The number of tokens that its answer is still expected to get."""

    @property
    def last_run(self) -> int:
        """The number of the last iteration for which it was planned."""

    def allowance_s(self, now: float) -> float:
        """Returns how many seconds the next iteration may take for the sake of this request. Real time only."""

    def slack_s(self, now: float) -> float:
        """Returns the seconds until its next token is due; negative if it is late. Real time only."""

    def stream_slack_s(self, now: float) -> float:
        """The same, had its first token been due when it was sampled: one that was early earns no pause."""

    def is_lost(self, now: float) -> bool:
        """Returns whether its objective is missed."""


AnyDecode = TypeVar("AnyDecode", bound=DecodeRequest)


class DecodeBoundary(BoundaryView, Protocol):
    """A policy's view of an instance that decodes."""

    # ---- the requests here -------------------------------------------------------------------------------------------

    @property
    def running(self) -> Sequence[DecodeRequest]:
        """The running requests, in order of admission."""

    def ready_and_pending(self) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
        """Returns the running requests that compute one token, and those that have more to compute."""

    @property
    def arriving(self) -> Sequence[DecodeRequest]:
        """Admitted requests with KV on its way."""

    @property
    def requests(self) -> Sequence[DecodeRequest]:
        """The candidate requests, which may join the running batch at any time, in the order in which they were
        offered."""

    @property
    def owners_compete(self) -> bool:
        """Whether the candidate requests have several owners, and so are in the order of their owners' turns."""

    @property
    def batch(self) -> Sequence[DecodeRequest]:
        """The candidate batch, which runs next, in the order in which its requests were offered."""

    @property
    def first_batch_to_stay(self) -> int:
        """Batches with smaller numbers must leave, because this one replaces them; 0: none must."""

    def should_wait(self, request: DecodeRequest) -> bool:
        """Returns whether another prompt computes the prefix of this candidate, or the prefix's KV is on its way for
        another request. It would share that KV afterwards."""

    def was_evicted(self, request: DecodeRequest) -> bool:
        """Returns whether the policy ordered the request's eviction at the last boundary already."""

    # ---- what is free ------------------------------------------------------------------------------------------------

    @property
    def num_lendable_blocks(self) -> int:
        """Blocks of best effort that real time may share if none is free, provided that requests share blocks from both
        ends (`share_blocks`). New prompts and running requests may share them, but requests from the pool may not."""

    def num_away(self, request: DecodeRequest) -> int:
        """Returns the number of its tokens with slots that real time has overwritten. Their KV is restored from host
        memory before it runs."""

    def num_freed(self, request: DecodeRequest) -> int:
        """Returns the number of blocks that become free when this request leaves: its blocks without the shared
        ones."""

    def num_freed_together(self, requests: Iterable[DecodeRequest]) -> int:
        """Returns the number of blocks that become free when all of these running requests leave, those included that
        only they share."""

    @property
    def num_slots_to_come(self) -> int: ...

    def growth(self, num_iterations: int, is_rt: bool | None = None) -> int:
        """Returns how many more blocks the running and arriving requests need for the next `num_iterations` iterations.
        With `is_rt`, counts only that class."""

    def growth_of(self, request: DecodeRequest, num_iterations: int, layout: Layout | None = None) -> int:
        """Returns how many more blocks the request needs for the next `num_iterations` iterations. A candidate has none
        yet; `layout` is the one that it would have."""

    # ---- what is to be done ------------------------------------------------------------------------------------------

    def evict(self, requests: Iterable[DecodeRequest]) -> None:
        """Evicts these requests with their KV to the pool, as soon as it has room. They may run until then, but get no
        more blocks. A request that is not passed stays, even if an earlier call passed it. Embeddings are not allowed:
        use `drop`."""

    def drop(self, requests: Iterable[DecodeRequest]) -> None:
        """Drops these running requests with their KV. Their blocks and slots are free at once. They become candidates
        again when the router offers them, and KV that is not in the pool is computed again. They must not have been
        planned for this iteration."""

    def admit(self, request: DecodeRequest, layout: Layout = PLAIN) -> None:
        """Admits a candidate, for which there must be room: takes its blocks and starts to load its KV. A request
        without any KV runs from now on. With `INPUTS`, such a request keeps inputs as long as it is here, if the
        instance can."""

    def run(self, request: DecodeRequest) -> bool:
        """Plans all pending tokens of the request, so that it samples a token. Returns False and does nothing if blocks
        are missing or the iteration has too few tokens left. The same holds for a request with kept inputs if too few
        of `limits.max_restored_blocks` are left."""

    def run_many(self, requests: Sequence[AnyDecode]) -> list[AnyDecode]:
        """Calls `run` for each of these, and returns those for which it succeeded. Faster for many requests."""

    def chunk(self, request: DecodeRequest, num_tokens: int) -> bool:
        """Plans `num_tokens` of the pending tokens. With all of them, the request samples a token. Returns False like
        `run`."""

    def hold(self, seconds: float) -> None:
        """Runs nothing for this time, unless something happens before."""


# ---- prefill instances -----------------------------------------------------------------------------------------------


class PrefillRequest(RequestView, Protocol):
    """A prompt at a prefill instance, or a decode instance's candidate that is staged there."""

    @property
    def owner(self) -> str: ...

    @property
    def ttft_s(self) -> float | None:
        """Its TTFT objective in seconds; None if it has none."""

    @property
    def since_s(self) -> float:
        """When it was first seen here."""

    @property
    def num_computed(self) -> int: ...

    @property
    def num_pending(self) -> int: ...

    @property
    def predicted_len(self) -> int:
        """The predicted number of output tokens; 0: unknown."""


AnyPrefill = TypeVar("AnyPrefill", bound=PrefillRequest)


class PrefillBoundary(BoundaryView, Protocol):
    # ---- the requests here -------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> Sequence[PrefillRequest]:
        """Prompts without blocks, in order of arrival."""

    def is_waiting(self, request: PrefillRequest) -> bool: ...

    def in_turn(self, requests: Sequence[PrefillRequest]) -> Sequence[PrefillRequest]:
        """Returns these prompts, which wait or are being computed, in their order. If they have several owners, one of
        an owner that has fewer prompts of its class here goes first, as if each prompt before it had started."""

    @property
    def started(self) -> Sequence[PrefillRequest]:
        """Prompts with blocks: those that are being loaded, computed, saved or preempted."""

    @property
    def computing(self) -> Sequence[PrefillRequest]: ...

    @property
    def short_of_blocks(self) -> PrefillRequest | None:
        """A decode instance's candidate that waits for blocks. Freed blocks are for it, not for new prompts."""

    @property
    def is_be_started(self) -> bool:
        """Whether a best-effort prompt is being computed or loaded."""

    @property
    def rt_behind_copies(self) -> Sequence[PrefillRequest]:
        """Real time that continues when current copies have ended."""

    def should_wait(self, request: PrefillRequest) -> bool:
        """Returns whether another prompt computes the prefix of this one. It then waits for that, and shares the KV."""

    # ---- what is free ------------------------------------------------------------------------------------------------

    def blocks_for(self, request: PrefillRequest) -> int:
        """Returns the number of blocks that it needs to start, or to be staged."""

    # ---- what is to be done ------------------------------------------------------------------------------------------

    def admit(self, request: PrefillRequest) -> None:
        """Starts the prompt. Takes its blocks and a slot, which must be free."""

    def preempt(self, request: PrefillRequest) -> None:
        """Preempts a prompt that is being computed. Its KV so far is saved, and it waits again."""

    def chunk(self, request: PrefillRequest, num_tokens: int) -> None:
        """Plans `num_tokens` tokens of a prompt that is being computed; at most as many as are left."""
