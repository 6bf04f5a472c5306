"""The operations that models are written in, and the contract of whoever executes them.

A model's forward is a sequence of these calls and nothing else, so that a backend may run them one by one
(`torch`), record them once and replay them as one native program (`cpu`), or capture them (CUDA graphs).
`compile` is that seam: it turns a function of these operations into something that runs one step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch

from alignedserve.ops.step import StepInputs
from alignedserve.ops.truncate import truncate
from alignedserve.sampling_params import SamplingParams

# What stands for a token where the logits hold NaN or infinity.
BROKEN = -1


class Activation(Enum):
    NONE = "none"
    RELU = "relu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    # the weight's two parts are gate and up: silu(gate) * up, half as wide as the weight
    SILU_GATED = "silu"


@dataclass(frozen=True)
class AttentionSpec:
    """What one layer's attention does between its qkv projection and its output projection."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    # latest tokens (itself included) a token attends to; None = all
    sliding_window: int | None = None
    # [max_position, head_dim] float32: cos of head_dim/2 angles, then sin of the same; None = no rotation
    rope: torch.Tensor | None = None
    # Qwen3: RMS norm weights [head_dim] for q and k, applied per head before the rotation
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_eps: float = 1e-6
    # the last layer: nobody asks for other rows of its result
    outputs_only: bool = False


# A backend's own handle on a value or a weight. To a model these are opaque.
Value = Any
Linear = Any


class Ops(ABC):
    name: str
    device: torch.device
    dtype: torch.dtype

    @abstractmethod
    def linear_weight(
        self,
        parts: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor] | None = None,
        activation: Activation = Activation.NONE,
    ) -> Linear:
        """A linear layer whose output columns are those of all `parts` ([out, in] each) side by side.

        `activation` is applied to the output. The parts are copied, never kept: the caller may free them.
        """

    @abstractmethod
    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """An owned copy (a source may hand out views of a mapped file), in this backend's dtype and on its device."""

    @abstractmethod
    def bind_cache(self, cache: torch.Tensor) -> None:
        """The KV cache that `attention` reads and writes: [block, layer, k|v, kv_head, slot, head_dim].

        Called once, before `compile`.
        """

    @abstractmethod
    def embed(
        self, table: torch.Tensor | Linear, ids: torch.Tensor, offset: int = 0, add_to: Value | None = None
    ) -> Value:
        """table[ids + offset], plus `add_to` if given. `ids` is `StepInputs.token_ids` or `.positions`.

        The table may be the weight of a linear layer (no activation): tied embeddings are kept once.
        """

    @abstractmethod
    def rms_norm(self, x: Value, weight: torch.Tensor, eps: float) -> Value: ...

    @abstractmethod
    def layer_norm(
        self, x: Value, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> Value: ...

    @abstractmethod
    def linear(self, x: Value, weight: Linear, residual: Value | None = None) -> Value:
        """activation(x @ weight.T + bias), plus `residual` if given (never both an activation and a residual).

        The residual may be overwritten: it is of no use afterwards.
        """

    @abstractmethod
    def attention(self, qkv: Value, spec: AttentionSpec) -> Value:
        """Norm and rotate q and k, write k and v into the cache at the step's slots, attend causally.

        `qkv` is [tokens, (num_heads + 2 * num_kv_heads) * head_dim]: q heads, k heads, v heads.
        Returns [tokens, num_heads * head_dim], or [outputs, ...] if `spec.outputs_only`.
        """

    @abstractmethod
    def outputs(self, x: Value) -> Value:
        """The rows of the step's outputs: [tokens, width] to [outputs, width]. What follows works on those alone."""

    @abstractmethod
    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per row: the first of the largest logits; whether it holds NaN or its maximum is not finite.

        Not traced.
        """

    @abstractmethod
    def gumbel_argmax(self, logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Per row: a token drawn from softmax(logits), with noise that depends on the row's key (int64) only.

        Not traced.
        """

    def draw(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Per row: the token that its temperature, top_k, top_p and min_p choose, with noise of its key; whether it is
        broken, as `argmax` has it.

        Changes the logits. Not traced, and does not wait for a device where it can be helped: here it can not.
        """
        tokens, is_broken = self.argmax(logits)
        is_random = torch.tensor([not wanted.is_greedy for wanted in params], device=logits.device)
        random = (is_random & ~is_broken).nonzero().flatten()
        for row in random.tolist():
            truncate(logits[row], params[row])
        if len(random):
            chosen = logits if len(random) == len(logits) else logits[random]
            tokens[random] = self.gumbel_argmax(chosen, keys.to(logits.device)[random])
        return tokens, is_broken

    @abstractmethod
    def compile(
        self,
        forward: Callable[[StepInputs], Value],
        logits: Callable[[Value], Value],
        step: StepInputs,
        max_rows: int,
        is_trial: bool = False,
    ) -> CompiledModel:
        """Makes `forward` (the step's tokens to hidden states of its outputs) and `logits` (rows of those to logits)
        runnable. `is_trial`: to see how much memory a step needs, and then no more; it may be slow."""


class CompiledModel(ABC):
    @abstractmethod
    def forward(self) -> torch.Tensor:
        """Runs the step that the StepInputs hold. Returns hidden states, [num_outputs, hidden].

        The result is overwritten by the next call.
        """

    @abstractmethod
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 logits [len(rows), vocab] of the given rows (int32) of the latest hidden states.

        len(rows) <= max_rows. The result is overwritten by the next call.
        """

    def likeliest(self, num_rows: int) -> np.ndarray | None:
        """Per row of the latest logits its likeliest token (the first of them), or BROKEN.

        None where that was not computed with the step: see Ops.argmax. Waits for the device.
        """
        return None
