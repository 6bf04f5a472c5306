"""What a policy sees of an instance between two iterations, and what it can order there.

A policy sees counts, lengths, deadlines and predictions, never tensors or block ids. Its calls take effect in their
order, and take blocks, slots and tokens at once: the next call sees what is left. What does not fit is refused with
False, or raises an error where the policy could have known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.timing.deadlines import Deadlines
from alignedserve.types import RequestKey

# ---- decode and colocated instances ----------------------------------------------------------------------------------


class DecodeRequest(Protocol):
    """A request that runs, or is to run, at a decode instance. See `decode_worker/scheduled_request.py` for more."""

    # The policy keeps here what it likes, as long as the request is here.
    mark: Any

    @property
    def key(self) -> RequestKey: ...

    @property
    def is_rt(self) -> bool: ...

    @property
    def deadlines(self) -> Deadlines: ...

    @property
    def is_embedding(self) -> bool:
        """Whether it ends when its prompt is computed, without a token. Its KV can't go to the pool."""

    @property
    def batch(self) -> int:
        """The number of the batch that it belongs to, a later one's being larger; 0: it belongs to none."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of its prompt and output."""

    @property
    def num_cached(self) -> int:
        """The number of tokens whose KV is here, or on its way."""

    @property
    def num_pending(self) -> int:
        """The number of tokens to compute before the next one is sampled: one, unless KV was lost."""

    @property
    def num_pooled(self) -> int:
        """The number of tokens whose KV the pool has as well."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_columns(self) -> int:
        """The number of columns that its blocks are for (see `protocol/kv_span.py`), those that are passed included."""

    @property
    def num_passed(self) -> int:
        """The number of its first columns that no later token attends to in layers with a window: it holds no blocks
        for them there."""

    @property
    def keeps_inputs(self) -> bool:
        """Whether the inputs of layers are kept of it in place of KV: its blocks hold twice as many tokens, and in each
        iteration that it runs in, K and V of all its earlier tokens are computed from them. It can be dropped, not
        evicted."""

    @property
    def num_output(self) -> int: ...

    @property
    def num_left(self) -> int:
        """The number of tokens that its answer is still expected to have."""

    @property
    def last_run(self) -> int:
        """The number of the last iteration for which it was planned."""

    def allowance_s(self, now: float) -> float:
        """How many seconds the next iteration may take for the sake of this request, which is real time."""

    def slack_s(self, now: float) -> float:
        """How many seconds there are until its next token is due, which is real time; negative if it is late."""

    def is_lost(self, now: float) -> bool:
        """Whether it is so late that hurrying won't help."""


AnyDecode = TypeVar("AnyDecode", bound=DecodeRequest)


class DecodeBoundary(Protocol):
    """What a policy sees of an instance that decodes."""

    @property
    def limits(self) -> InstanceLimits: ...

    @property
    def now(self) -> float: ...

    # ---- the requests here -------------------------------------------------------------------------------------------

    @property
    def running(self) -> Sequence[DecodeRequest]:
        """The running requests, the earliest first."""

    def ready_and_behind(self) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
        """Of the running requests, those that compute one token, and those that have more to compute."""

    @property
    def arriving(self) -> Sequence[DecodeRequest]:
        """The admitted requests whose KV is on its way."""

    @property
    def requests(self) -> Sequence[DecodeRequest]:
        """The candidate requests, which may join the running batch at any time, in the order in which they were
        offered."""

    @property
    def batch(self) -> Sequence[DecodeRequest]:
        """The candidate batch, which runs next, in the order in which its requests were offered."""

    @property
    def first_batch_to_stay(self) -> int:
        """Batches with smaller numbers are to leave, for this one runs in their place; 0: none has to."""

    def had_better_wait(self, request: DecodeRequest) -> bool:
        """Whether another prompt computes the prefix of this prompt, which has not started: it shares the KV
        afterwards."""

    def was_evicted(self, request: DecodeRequest) -> bool:
        """Whether the request's eviction was already wanted at the last boundary."""

    # ---- what is free ------------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_free_slots(self) -> int: ...

    @property
    def num_blocks_to_come(self) -> int:
        """The number of blocks of leaving requests: they become free when their KV has been copied."""

    @property
    def num_lendable_blocks(self) -> int:
        """The number of best effort's blocks that real time may share where none is free, if requests share blocks
        from both ends (`share_blocks`). A prompt that begins may, and what runs; not what comes from the pool."""

    def num_away(self, request: DecodeRequest) -> int:
        """The number of its tokens whose slots real time has overwritten: their KV comes back from host memory before
        it runs."""

    def num_freed(self, request: DecodeRequest) -> int:
        """The number of blocks that become free when this request leaves: those that it does not share."""

    @property
    def num_slots_to_come(self) -> int: ...

    def growth(self, num_iterations: int, is_rt: bool | None = None) -> int:
        """The number of blocks that the running and arriving requests, or those of one class, need for so many
        iterations beyond those they have."""

    def growth_of(self, request: DecodeRequest, num_iterations: int, keeps_inputs: bool = False) -> int:
        """The number of blocks that the request needs for so many iterations beyond those it has; a candidate has
        none, and `keeps_inputs` says what would be kept of it."""

    # ---- what is to be done ------------------------------------------------------------------------------------------

    def evict(self, requests: Iterable[DecodeRequest]) -> None:
        """Evicts these, with their KV, to the pool, as soon as there is room for it. They may run until then, but get
        no more blocks. A request that is not given stays, even if an earlier call gave it. None may be for an
        embedding: `drop` is for those."""

    def drop(self, requests: Iterable[DecodeRequest]) -> None:
        """Drops these running requests, with their KV: their blocks and slots are free at once. They are candidates
        again later, when the router offers them, and all that the pool does not have of them is computed again. None of
        them may be planned before."""

    def admit(self, request: DecodeRequest, keeps_inputs: bool = False) -> None:
        """Admits a candidate: its blocks are taken, and its KV is on its way. If there is no KV of it, it runs from
        here on; then, and where `limits.can_keep_inputs`, `keeps_inputs` says what is kept of it as long as it is here.
        There must be room for it."""

    def run(self, request: DecodeRequest) -> bool:
        """Plans all pending tokens of the request, so that it samples a token. Returns False and does nothing if
        blocks are missing, or the iteration has too few tokens left, or, for a request of which inputs are kept, too
        few of `limits.max_restored_blocks`."""

    def run_each(self, requests: Sequence[AnyDecode]) -> list[AnyDecode]:
        """Calls `run` for each of these, and returns those for which it succeeded. It is quicker for many requests."""

    def chunk(self, request: DecodeRequest, num_tokens: int) -> bool:
        """Plans so many of the pending tokens; with all of them, the request samples a token. Returns False like
        `run`."""

    @property
    def num_tokens_left(self) -> int:
        """The number of tokens that the iteration may still compute."""

    def hold(self, seconds: float) -> None:
        """Lets nothing run for so long, unless something happens before."""


# ---- prefill instances -----------------------------------------------------------------------------------------------


class PrefillRequest(Protocol):
    """A prompt at a prefill instance, or a candidate of a decode instance that is staged there."""

    @property
    def key(self) -> RequestKey: ...

    @property
    def is_rt(self) -> bool: ...

    @property
    def deadlines(self) -> Deadlines: ...

    @property
    def ttft_s(self) -> float | None:
        """Its TTFT objective in seconds; None if it has none."""

    @property
    def since_s(self) -> float:
        """When it was first seen here."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt, and of the output of a request that goes on."""

    @property
    def num_computed(self) -> int: ...

    @property
    def num_pending(self) -> int: ...

    @property
    def num_output(self) -> int: ...

    @property
    def predicted_len(self) -> int:
        """The predicted number of tokens of its output; 0 if nothing is known."""

    @property
    def num_blocks(self) -> int: ...


AnyPrefill = TypeVar("AnyPrefill", bound=PrefillRequest)


class PrefillBoundary(Protocol):
    @property
    def limits(self) -> InstanceLimits: ...

    @property
    def now(self) -> float: ...

    # ---- the requests here -------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> Sequence[PrefillRequest]:
        """Prompts without blocks, in order of arrival."""

    def is_waiting(self, request: PrefillRequest) -> bool: ...

    @property
    def started(self) -> Sequence[PrefillRequest]:
        """Prompts with blocks: those that are being loaded, computed, saved or preempted."""

    @property
    def computing(self) -> Sequence[PrefillRequest]: ...

    @property
    def short_of_blocks(self) -> PrefillRequest | None:
        """A decode instance's candidate which waits for blocks: those that become free are for it, not for new
        prompts."""

    @property
    def is_be_started(self) -> bool:
        """Whether a best-effort prompt is being computed, or loaded."""

    @property
    def is_rt_copied(self) -> bool:
        """Whether real time goes on when a copy under way has ended."""

    def had_better_wait(self, request: PrefillRequest) -> bool:
        """Whether another prompt computes the prefix of this one: it shares the KV afterwards, and does not start
        until then."""

    # ---- what is free ------------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_blocks_to_come(self) -> int:
        """The number of blocks of prompts that are being preempted."""

    @property
    def num_free_slots(self) -> int: ...

    def blocks_for(self, request: PrefillRequest) -> int:
        """The number of blocks that it needs to start, or to be staged."""

    @property
    def num_tokens_left(self) -> int:
        """The number of tokens that the iteration may still compute."""

    # ---- what is to be done ------------------------------------------------------------------------------------------

    def admit(self, request: PrefillRequest) -> None:
        """Starts the prompt. It takes its blocks and a slot, which must be there."""

    def preempt(self, request: PrefillRequest) -> None:
        """Preempts a prompt that is being computed. What was computed is saved, and it waits again."""

    def chunk(self, request: PrefillRequest, num_tokens: int) -> None:
        """Plans so many tokens of a prompt that is being computed; at most as many as are left."""
