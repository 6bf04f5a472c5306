"""A request as the engine sees it: its tokens, its output, and how far its KV is computed."""

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
    # It is not in the batch; its blocks may be under a copy.
    HELD = "held"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    # These fields are set by the caller.
    request_id: RequestId
    prompt: np.ndarray
    params: SamplingParams
    seed: int
    # These tokens end the output; the end of sequence is one of them unless params.ignore_eos.
    stop_token_ids: frozenset[int]
    max_output_len: int
    # The matcher of params.structured_outputs.
    matcher: Matcher | None = None
    # It fills its blocks from the last slot down, so that another request can have the first ones.
    is_reversed: bool = False
    # Whether its blocks hold the inputs of each layer in place of K and V.
    keeps_inputs: bool = False
    # How an embedding is made of the prompt, one of `protocol.pooling.POOLINGS`: it ends with that, without a token.
    # None: it generates tokens.
    pooling: str | None = None
    # The number of its adapter (`ops/adapters.py`); 0: none.
    adapter: int = 0

    # These fields are set by the engine.
    status: Status = Status.HELD
    # The number of tokens whose KV, or inputs, exist.
    num_computed: int = 0
    # While it runs: the columns for which it has blocks in all groups of layers, those that it has passed included.
    num_columns: int = 0
    output: list[int] = field(default_factory=list)
    # How often each token is in the output; kept only for requests with penalties.
    output_counts: dict[int, int] = field(default_factory=dict)
    # The sum of the prompt's final states so far, for their mean; a tensor.
    states_sum: Any = None
    # Its row in the batch table while it runs.
    row: int = -1
    # The prompt's length, which is asked for so often that numpy's own answer takes too long.
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.prompt)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + len(self.output)

    @property
    def num_pending(self) -> int:
        """The number of tokens whose KV is still to be computed: the prompt's rest, or the token sampled last."""
        return self.num_prompt + len(self.output) - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the next tokens to be computed predict prompt tokens that logprobs were asked for."""
        return self.params.prompt_logprobs is not None and self.num_computed < self.num_prompt - 1

    def num_outputs(self, count: int) -> int:
        """For how many of the next `count` tokens, the last ones, hidden states are wanted."""
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
