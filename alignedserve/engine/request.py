"""The engine's view of a request: its tokens, its output, and how far its KV is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from alignedserve.sampling_params import SamplingParams
from alignedserve.text.grammar import Matcher
from alignedserve.types import RequestId


class Status(Enum):
    RUNNING = "running"
    # Not in the batch. A copy from or to its blocks may be under way.
    HELD = "held"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Layout:
    """How a request fills its blocks, if not in the plain way."""

    # It fills each block from the last slot down, so that another request can use the first slots.
    is_reversed: bool = False
    # Its last blocks, this many, are lent: they follow by `Engine.lend`.
    num_lent: int = 0
    # Its blocks hold the inputs of each layer in place of K and V.
    keeps_inputs: bool = False


PLAIN = Layout()


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
    # See `Layout`.
    is_reversed: bool = False
    keeps_inputs: bool = False
    # How an embedding is made of the prompt, one of `protocol.pooling.POOLINGS`. The request ends with it, without a
    # token. None: it generates tokens.
    pooling: str | None = None
    # The number of its adapter (`ops/adapters.py`); 0: none.
    adapter: int = 0

    # Set by the engine.
    status: Status = Status.HELD
    # Tokens with KV, or with kept inputs.
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

    def __post_init__(self) -> None:
        self.num_prompt = len(self.prompt)

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


# Requests, each with the number of its tokens that an iteration computes.
Work = Sequence[tuple[Request, int]]
