"""What a policy sees of an instance between two iterations, and what it can tell it to do.

A policy sees counts, lengths, deadlines and predictions, never tensors or ids of blocks. What it says is carried out in
the order in which it says it, and takes blocks, slots and tokens at once: what is left is what the next call sees. What
does not fit is refused with False, or is an error where the policy could have known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.timing.deadlines import Deadlines
from alignedserve.types import RequestKey

# ---- decode and colocated instances ----------------------------------------------------------------------------------


class DecodeRequest(Protocol):
    """A request that runs, or is to run, at a decode instance. `decode_worker/scheduled_request.py` tells more."""

    # for the policy to remember what it likes of it as long as it is here
    mark: Any

    @property
    def key(self) -> RequestKey: ...

    @property
    def is_rt(self) -> bool: ...

    @property
    def deadlines(self) -> Deadlines: ...

    @property
    def batch(self) -> int:
        """The number of the batch with which it came; that of a candidate request is that of the batch it joined."""

    @property
    def num_tokens(self) -> int:
        """Of prompt and output."""

    @property
    def num_cached(self) -> int:
        """Tokens whose KV is here, or is on its way."""

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next one is sampled: one, where nothing was lost."""

    @property
    def num_pooled(self) -> int:
        """Tokens whose KV the pool has as well."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_output(self) -> int: ...

    @property
    def num_left(self) -> int:
        """Tokens that its answer will still have, as far as is known."""

    @property
    def last_run(self) -> int:
        """The number of the last iteration of which it was part."""

    def allowance_s(self, now: float) -> float:
        """What the next iteration may take for its sake, of real time."""

    def is_lost(self, now: float) -> bool:
        """It is so late that hurrying won't help."""


AnyDecode = TypeVar("AnyDecode", bound=DecodeRequest)


class DecodeBoundary(Protocol):
    """Of an instance that decodes."""

    @property
    def limits(self) -> InstanceLimits: ...

    @property
    def now(self) -> float: ...

    # ---- who is here -------------------------------------------------------------------------------------------------

    @property
    def running(self) -> Sequence[DecodeRequest]:
        """Those that came first first."""

    def ready_and_behind(self) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
        """Of those that run, who computes one token, and who has more to compute."""

    @property
    def arriving(self) -> Sequence[DecodeRequest]:
        """Admitted, and their KV is on its way."""

    @property
    def requests(self) -> Sequence[DecodeRequest]:
        """Candidates that may join the running batch at any time, in the order in which they were offered."""

    @property
    def batch(self) -> Sequence[DecodeRequest]:
        """Candidates that are the batch to run next, likewise."""

    def had_better_wait(self, request: DecodeRequest) -> bool:
        """Of a prompt that has not started: another one computes what it begins with. It shares that later."""

    def was_evicted(self, request: DecodeRequest) -> bool:
        """Whether its eviction was wanted at the last boundary already."""

    # ---- what is free ------------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_free_slots(self) -> int: ...

    @property
    def num_blocks_to_come(self) -> int:
        """Of those that leave: free when their KV has been copied."""

    @property
    def num_slots_to_come(self) -> int: ...

    def growth(self, num_iterations: int, is_rt: bool | None = None) -> int:
        """Blocks that all who run or arrive need in so many iterations beyond what they have; or those of one class."""

    def growth_of(self, request: DecodeRequest, num_iterations: int) -> int:
        """Likewise one of them; a candidate has none."""

    # ---- what is to be done ------------------------------------------------------------------------------------------

    def evict(self, requests: Iterable[DecodeRequest]) -> None:
        """To the pool, with their KV, as soon as there is room for it there. They may run until then, but get no more
        blocks. Whoever is not named stays, even if it was named before."""

    def admit(self, request: DecodeRequest) -> None:
        """A candidate: its blocks are taken, and its KV is on its way. One of which there is no KV runs from here on.
        There must be room for it."""

    def run(self, request: DecodeRequest) -> bool:
        """It computes all that it has pending, and samples a token. False, and nothing is done: there are not enough
        blocks, or the iteration has no tokens left for it."""

    def run_each(self, requests: Sequence[AnyDecode]) -> list[AnyDecode]:
        """`run` for each of these; returns those for which it did not fail. Quicker, where they are many."""

    def chunk(self, request: DecodeRequest, num_tokens: int) -> bool:
        """Likewise so many of what it has pending; with all of them, it samples a token."""

    @property
    def num_tokens_left(self) -> int:
        """That the iteration may still compute."""

    def hold(self, seconds: float) -> None:
        """Nothing runs for so long, unless something happens before."""


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
        """Its objective."""

    @property
    def since_s(self) -> float:
        """When it was first seen here."""

    @property
    def num_tokens(self) -> int:
        """Of the prompt, and of output where a request goes on."""

    @property
    def num_computed(self) -> int: ...

    @property
    def num_pending(self) -> int: ...

    @property
    def num_output(self) -> int: ...

    @property
    def predicted_len(self) -> int:
        """Of its output; 0: nothing is known."""

    @property
    def num_blocks(self) -> int: ...


AnyPrefill = TypeVar("AnyPrefill", bound=PrefillRequest)


class PrefillBoundary(Protocol):
    @property
    def limits(self) -> InstanceLimits: ...

    @property
    def now(self) -> float: ...

    # ---- who is here -------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> Sequence[PrefillRequest]:
        """Prompts without blocks, in the order in which they came."""

    def is_waiting(self, request: PrefillRequest) -> bool: ...

    @property
    def started(self) -> Sequence[PrefillRequest]:
        """Prompts with blocks: those that are loaded, computed or saved."""

    @property
    def computing(self) -> Sequence[PrefillRequest]: ...

    @property
    def short_of_blocks(self) -> PrefillRequest | None:
        """A candidate of a decode instance that waits for blocks: what becomes free is for it, not for new prompts."""

    @property
    def is_be_started(self) -> bool:
        """A best-effort prompt is being computed, or loaded."""

    @property
    def is_rt_copied(self) -> bool:
        """Real time goes on when a copy under way has ended."""

    def had_better_wait(self, request: PrefillRequest) -> bool:
        """Another prompt computes what this one begins with: it is not started meanwhile, and shares that then."""

    # ---- what is free ------------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_blocks_to_come(self) -> int:
        """Of prompts that give up theirs."""

    @property
    def num_free_slots(self) -> int: ...

    def blocks_for(self, request: PrefillRequest) -> int:
        """To start it, or to stage it."""

    @property
    def num_tokens_left(self) -> int:
        """That the iteration may still compute."""

    # ---- what is to be done ------------------------------------------------------------------------------------------

    def start(self, request: PrefillRequest) -> None:
        """It takes its blocks and a slot, which must be there."""

    def preempt(self, request: PrefillRequest) -> None:
        """One that is being computed leaves its blocks. What was computed is saved, and it waits again."""

    def chunk(self, request: PrefillRequest, num_tokens: int) -> None:
        """So many tokens of one that is being computed; not more than are left."""
