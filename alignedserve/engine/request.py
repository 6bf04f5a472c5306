"""A request of the engine: whether it is valid, how far it is, and when it ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from alignedserve.engine.lora_modules import name_of
from alignedserve.kv.held import Held
from alignedserve.kv.layout import Layout
from alignedserve.protocol.pooling import POOLINGS
from alignedserve.sampling_params import SamplingParams
from alignedserve.text.grammar import Matcher
from alignedserve.types import InvalidRequest, RequestId

# ---- whether it is valid ---------------------------------------------------------------------------------------------

# Every mistake that a caller can make is found here, before anything is queued.


@dataclass(frozen=True)
class Vocabulary:
    # Rows of the embedding. Token ids are 0 .. size - 1.
    size: int
    eos_token_ids: frozenset[int]


def check_request(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    vocabulary: Vocabulary,
    max_model_len: int,
    pooling: str | None = None,
) -> None:
    """Raises InvalidRequest naming the field, its value and what is allowed. `pooling`: see `Request`."""
    length = len(prompt_token_ids)
    if length == 0:
        raise InvalidRequest("prompt: empty; at least one token is needed")
    if pooling is not None:
        _check_pooling(pooling, length, max_model_len)
    elif length >= max_model_len:
        raise InvalidRequest(
            f"prompt: {length} tokens; with max_model_len={max_model_len}, at most {max_model_len - 1} leave room "
            "for one output token"
        )
    check_ids("prompt_token_ids", prompt_token_ids, vocabulary)
    check_ids("stop_token_ids", params.stop_token_ids or (), vocabulary)
    check_ids("allowed_token_ids", params.allowed_token_ids or (), vocabulary)
    check_ids("bad_words", [token for ids in params.bad_word_ids or () for token in ids], vocabulary)
    check_ids("logit_bias", list(params.logit_bias or ()), vocabulary)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > vocabulary.size:
            raise InvalidRequest(f"{name}={count}: must be at most the vocabulary's size, {vocabulary.size}")


def _check_pooling(pooling: str, length: int, max_model_len: int) -> None:
    if pooling not in POOLINGS:
        raise InvalidRequest(f"pooling={pooling!r}: must be one of {', '.join(POOLINGS)}")
    if length > max_model_len:
        raise InvalidRequest(f"prompt: {length} tokens; at most {max_model_len} are possible")


def check_adapter(name: str, known: Collection[str]) -> None:
    """Raises InvalidRequest for an unknown adapter. `name` is empty if the request has none."""
    if name and name not in known:
        loaded = ", ".join(map(name_of, known)) or "none"
        raise InvalidRequest(f"adapter={name_of(name)!r}: not loaded; loaded are {loaded}")


def check_ids(name: str, ids: Sequence[int], vocabulary: Vocabulary) -> None:
    try:
        array = np.asarray(ids)
        is_integers = array.ndim == 1 and (array.size == 0 or array.dtype.kind in "iu")
    except (ValueError, OverflowError):
        is_integers = False
    if not is_integers:
        raise InvalidRequest(f"{name}: must be a flat list of integers")
    outside = array[(array < 0) | (array >= vocabulary.size)]
    if len(outside):
        raise InvalidRequest(
            f"{name}: token id {outside[0]} is outside the vocabulary, 0 to {vocabulary.size - 1}"
        )


# ---- its state -------------------------------------------------------------------------------------------------------

# The engine's view of a request: its tokens, its output, and how far its KV is computed.


class Status(Enum):
    RUNNING = "running"
    # Not in the batch. A copy from or to its blocks may be under way.
    HELD = "held"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    # Set by the caller.
    request_id: RequestId
    prompt: np.ndarray
    params: SamplingParams
    seed: int
    # Tokens that end the output. The end of sequence is among them unless params.ignore_eos.
    stop_token_ids: frozenset[int]
    max_output_len: int
    # The matcher for params.structured_outputs.
    matcher: Matcher | None = None
    # Its blocks. The owner of the request gives them to it, and frees them.
    held: Held = field(default_factory=Held)
    # How an embedding is made of the prompt, one of `protocol.pooling.POOLINGS`. The request ends with it, without a
    # token. None: it generates tokens.
    pooling: str | None = None
    # The number of its adapter (`ops/adapters.py`); 0: none.
    adapter: int = 0

    # Set by the engine.
    status: Status = Status.HELD
    # Tokens with KV, or whatever its blocks hold of them.
    num_computed: int = 0
    # While it runs: columns with blocks in all layer groups, passed ones included.
    num_columns: int = 0
    output: list[int] = field(default_factory=list)
    # How often each token occurs in the output. Kept only for requests with penalties.
    output_counts: dict[int, int] = field(default_factory=dict)
    # The sum of the prompt's final states so far, for their mean. A tensor.
    states_sum: Any = None
    # Its row in the batch table while it runs, else -1.
    row: int = -1
    # The prompt's length. It is cached, because it is read very often and len() of a numpy array is slow.
    num_prompt: int = field(init=False)
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt, self.layout = len(self.prompt), self.held.layout

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + len(self.output)

    @property
    def num_pending(self) -> int:
        """Tokens with KV still to be computed: the rest of the prompt, or the token sampled last."""
        return self.num_prompt + len(self.output) - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the next tokens to be computed predict prompt tokens with requested logprobs."""
        return self.params.prompt_logprobs is not None and self.num_computed < self.num_prompt - 1

    def num_outputs(self, count: int) -> int:
        """How many of the next `count` tokens need hidden states. They are the last ones."""
        if self.wants_prompt_logprobs or self.pooling == "mean":
            return count
        return int(count == self.num_pending)

    def tokens(self, start: int, end: int) -> np.ndarray:
        num_prompt = self.num_prompt
        if end <= num_prompt:
            return self.prompt[start:end]
        output = np.array(self.output[max(start - num_prompt, 0) : end - num_prompt], dtype=np.int32)
        return output if start >= num_prompt else np.concatenate([self.prompt[start:], output])


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request for `Engine.adopt`."""

    request_id: RequestId
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    # Its output so far, and how many of its tokens have KV.
    output: Sequence[int] = ()
    num_computed: int = 0
    # Its own matcher, if the caller had `grammars` make it. The first token waits for a matcher that is still being
    # compiled, and the whole batch with it.
    matcher: Matcher | None = None
    # See `Request`. For a mean, no token may be computed yet.
    pooling: str | None = None
    # The name of the adapter that all of its KV was computed with; empty if it has none.
    adapter: str = ""
    # See `Request`. If its blocks hold no KV, no token may be computed yet.
    held: Held = field(default_factory=Held)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    def check(self, can_keep_inputs: bool) -> None:
        """Raises ValueError if it has KV that it can't have."""
        found = f"{self.num_computed} tokens of it have KV"
        if not self.held.layout.holds_kv and (self.num_computed or not can_keep_inputs):
            raise ValueError(f"{self.request_id}: its inputs can't be kept; {found}")
        if self.pooling == "mean" and self.num_computed:
            raise ValueError(f"{self.request_id}: a mean needs the states of all tokens; {found}")

    def begin(self, prompt: np.ndarray, stop_token_ids: frozenset[int], max_model_len: int) -> Request:
        """Returns the request's state, without its adapter."""
        room = max_model_len - len(prompt)
        return Request(
            request_id=self.request_id,
            prompt=prompt,
            params=self.params,
            seed=self.seed,
            stop_token_ids=stop_token_ids,
            max_output_len=min(room, self.params.max_tokens or room),
            matcher=self.matcher,
            held=self.held,
            pooling=self.pooling,
            num_computed=self.num_computed,
            output=list(self.output),
        )


# Requests, each with the number of its tokens that an iteration computes.
Work = Sequence[tuple[Request, int]]


# ---- when it ends ----------------------------------------------------------------------------------------------------


class Endings:
    """Decides whether a request's newest token is its last."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._eos_token_ids = vocabulary.eos_token_ids
        # Tokens that end the output of some request, past ones included. A row with one of them is examined more
        # closely.
        self._is_stop = np.zeros(vocabulary.size, dtype=bool)
        self._mark(vocabulary.eos_token_ids)

    def watch(self, request: Request) -> None:
        """Adds the request's stop tokens to those that `suspects` finds."""
        self._mark(request.stop_token_ids)

    def suspects(self, tokens: np.ndarray, num_left: np.ndarray) -> list[int]:
        """Rows that may end with these tokens; all rows that do end are among them. `num_left`: tokens that each may
        still get."""
        rows: list[int] = np.flatnonzero(self._is_stop[tokens] | (num_left <= 0)).tolist()
        return rows

    def reasons(self, request: Request) -> tuple[str | None, int | None]:
        """(finish_reason, stop_reason) after the request's newest token; (None, None) if it continues."""
        token, num_output = request.output[-1], len(request.output)
        is_eos = token in self._eos_token_ids
        # A grammar allows the end of sequence only at its own end, never where something must follow.
        ends_grammar = request.matcher is not None and is_eos
        is_long_enough = num_output >= request.params.min_tokens
        if ends_grammar or (token in request.stop_token_ids and is_long_enough):
            is_plain_end = ends_grammar or (is_eos and not request.params.ignore_eos)
            return "stop", None if is_plain_end else token
        return ("length" if num_output >= request.max_output_len else None), None

    def _mark(self, token_ids: frozenset[int]) -> None:
        self._is_stop[[token for token in token_ids if token < len(self._is_stop)]] = True
