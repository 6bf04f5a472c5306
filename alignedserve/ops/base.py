"""The operations that models are written in, and the contract of the backends that execute them.

A model's forward is a sequence of these calls and nothing else, so that a backend may run them one by one (`torch`),
record them once and replay them as one native program (`cpu`), or capture them (CUDA graphs). `compile` is that seam:
it turns a function of these operations into something that runs one step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch

from alignedserve.kernels import int4
from alignedserve.kernels.quantised import FP8, INT4, INT8
from alignedserve.layer_groups import GroupedLayer, LayerGroups, one_group
from alignedserve.ops.adapters import LayerAdapters
from alignedserve.ops.experts import ExpertsSpec, TakeExpert
from alignedserve.ops.quantise import Part
from alignedserve.ops.shard import Shard, Split
from alignedserve.ops.step import StepInputs
from alignedserve.ops.truncate import truncate
from alignedserve.sampling_params import SamplingParams

# By what `quantization` may be.
BYTES_PER_WEIGHT = {INT8: 1.0, INT4: int4.BYTES_PER_WEIGHT, FP8: 1.0}
# This stands for a token where the logits hold NaN or infinity.
BROKEN = -1


class Activation(Enum):
    NONE = "none"
    RELU = "relu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    # The weight's two parts are gate and up: silu(gate) * up, half as wide as the weight; and with the other function.
    SILU_GATED = "silu"
    GELU_TANH_GATED = "gelu_tanh_gated"

    @property
    def is_gated(self) -> bool:
        return self in (Activation.SILU_GATED, Activation.GELU_TANH_GATED)


@dataclass(frozen=True)
class AttentionSpec:
    """What one layer's attention does between its qkv projection and its output projection."""

    # Its number in the model.
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    # How many of the latest tokens (itself included) a token attends to; None for all.
    sliding_window: int | None = None
    # [max_position, rotary_dim] float32: cos of rotary_dim/2 angles, then sin of the same, for the first rotary_dim
    # values of a head; None for no rotation.
    rope: torch.Tensor | None = None
    # Qwen3's RMS norm weights [head_dim] for q and k, applied per head before the rotation.
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_eps: float = 1e-6
    # [num_heads]: logits that take part in the softmax of a head and have no value; None for none.
    sinks: torch.Tensor | None = None
    # It is set for the last layer, of whose result no other rows are needed.
    outputs_only: bool = False


def check_rotary_dim(rope: torch.Tensor, head_dim: int) -> None:
    rotary_dim = rope.shape[1]
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise ValueError(f"rope must be an even number of values wide, at most {head_dim}, not {rotary_dim}")


def check_groups(
    cache: torch.Tensor, restored_kv: torch.Tensor | None, groups: LayerGroups | None
) -> LayerGroups:
    """Returns the groups of layers whose KV is in the cache: one of all its layers, if none are given."""
    num_layers = cache.shape[1]
    groups = one_group(num_layers) if groups is None else groups
    if groups.num_layers != num_layers:
        raise ValueError(f"cache must have the {groups.num_layers} layers of a group, not {num_layers}")
    if restored_kv is not None and groups.num_groups > 1:
        raise ValueError(f"inputs can be kept where layers are one group, not {groups.num_groups}")
    return groups


def place_of(spec: AttentionSpec, groups: LayerGroups, step: StepInputs) -> GroupedLayer:
    """Returns where the layer's KV is in the cache."""
    if step.num_groups != groups.num_groups:
        raise ValueError(f"StepInputs must have {groups.num_groups} groups of layers, not {step.num_groups}")
    if not 0 <= spec.layer < len(groups.layers):
        raise ValueError(f"layer must be below the cache's {len(groups.layers)}, not {spec.layer}")
    return groups.layers[spec.layer]


# These are a backend's own handles on a value or a weight, which are opaque to a model.
Value = Any
Linear = Any
Experts = Any


@dataclass(frozen=True)
class Projected:
    """What a layer's qkv was projected from: from `x`, where that is kept, K and V are projected again."""

    x: Value
    weight: Linear


class Ops(ABC):
    name: str
    device: torch.device
    dtype: torch.dtype
    # How linear layers keep their weights, if not in the dtype.
    quantization: str | None = None
    # Which part of the model this process has.
    shard = Shard()

    @abstractmethod
    def linear_weight(
        self,
        parts: Sequence[Part],
        biases: Sequence[torch.Tensor] | None = None,
        activation: Activation = Activation.NONE,
        is_head: bool = False,
        split: Split = Split.NONE,
        num_outputs: int = 0,
    ) -> Linear:
        """Makes a linear layer whose output columns are those of all `parts` ([out, in] each) side by side: all are
        floats, or all are in codes, and these are kept as they are.

        `activation` is applied to the output. The parts are copied, never kept: the caller may free them. The head
        yields logits, which choose between many tokens: it keeps eight bits at least. `split`: what this rank's layer
        is a part of. Where inputs are, there is no activation, and one rank alone has the biases. Where outputs are,
        all ranks have as many, of which the first `num_outputs` count.
        """

    @abstractmethod
    def with_adapters(self, weight: Linear, adapters: LayerAdapters) -> Linear:
        """Returns the linear layer with adapters, which are copied. `StepInputs.adapters` says which rows have which.

        Such a layer is used in `forward` alone, whose rows are the step's tokens or its outputs.
        """

    def scheme(self, is_head: bool) -> str | None:
        """How such a linear layer keeps its weight, if not in the dtype."""
        return INT8 if is_head and self.quantization == INT4 else self.quantization

    @abstractmethod
    def parameter(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns a copy of its own (a source may hand out views of a mapped file), in `dtype` or this backend's, and
        on its device."""

    @abstractmethod
    def bind_cache(
        self,
        cache: torch.Tensor,
        restored_kv: torch.Tensor | None = None,
        groups: LayerGroups | None = None,
    ) -> None:
        """Sets the KV cache that `attention` reads and writes: [block, layer of a group, k|v, kv_head, slot, row].

        A layer's KV is in the blocks of its group, which the step's block table and slots of that group name. Without
        `groups` all layers are one.

        Its dtype says what a row holds: head_dim values, or 8 bits for each (`kernels/kv_rows.py`). What `attention`
        writes in 8 bits it reads so, tokens of the same step included. `restored_kv`, [block, 1, k|v, kv_head, slot,
        head_dim], is given where inputs may be kept in place of K and V (`ops/kept_inputs.py`), which takes one group.
        It is called once, before `compile`.
        """

    @abstractmethod
    def embed(
        self,
        table: torch.Tensor | Linear,
        ids: torch.Tensor,
        offset: int = 0,
        add_to: Value | None = None,
        scale: float = 1.0,
    ) -> Value:
        """Returns table[ids + offset] * scale, plus `add_to` if given. `ids` is `StepInputs.token_ids` or `.positions`.

        The table may be the weight of a linear layer (no activation) where that is not quantised: tied embeddings are
        kept once then.
        """

    @abstractmethod
    def rms_norm(self, x: Value, weight: torch.Tensor, eps: float, residual: Value | None = None) -> Value:
        """Returns the norm of x times `weight` (here and in AttentionSpec in the backend's dtype or in float32), plus
        `residual` if given, which may be overwritten."""

    @abstractmethod
    def layer_norm(
        self, x: Value, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> Value: ...

    @abstractmethod
    def linear(self, x: Value, weight: Linear, residual: Value | None = None) -> Value:
        """Returns activation(x @ weight.T + bias), plus `residual` if given (never both an activation and a residual).
        What a row's adapter adds comes before the activation.

        The residual may be overwritten: the caller does not need it afterwards. Of a layer whose inputs are split over
        ranks `x` has this rank's, and the result is the whole one, on every rank. Of one whose outputs are split the
        leading rank has all of them; what others have is not defined.
        """

    @abstractmethod
    def expert_weights(self, spec: ExpertsSpec, take: TakeExpert) -> Experts:
        """Copies all experts, which are taken one by one in ascending order and not kept."""

    @abstractmethod
    def mix_experts(self, x: Value, logits: Value, experts: Experts, residual: Value) -> Value:
        """Returns, per row, the weighted sum of what its experts make of `x`, plus `residual`, which may be
        overwritten.

        `logits` is [rows, experts]: see `choose_experts`. A row's result does not depend on which other rows are there.
        """

    @abstractmethod
    def attention(self, qkv: Value, spec: AttentionSpec, projected: Projected | None = None) -> Value:
        """Norms and rotates q and k, writes k and v into the cache at the step's slots, and attends causally. Of
        sequences whose inputs are kept it writes `projected.x` instead, and restores what they attend to.

        `qkv` is [tokens, (num_heads + 2 * num_kv_heads) * head_dim]: q heads, k heads, v heads.
        Returns [tokens, num_heads * head_dim], or [outputs, ...] if `spec.outputs_only`.
        """

    @abstractmethod
    def outputs(self, x: Value) -> Value:
        """Returns the rows of the step's outputs: [tokens, width] to [outputs, width]. What follows works on those
        alone."""

    @abstractmethod
    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns, per row, the first of the largest logits, and whether it holds NaN or its maximum is not finite.

        It is not traced.
        """

    @abstractmethod
    def gumbel_argmax(self, logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Returns, per row, a token drawn from softmax(logits), with noise that depends on the row's key (int64) only.

        It is not traced.
        """

    def draw(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns, per row, the token that its temperature, top_k, top_p and min_p choose with the noise of its key,
        and whether it is broken, like `argmax`.

        It changes the logits and is not traced. A backend should not wait for its device here; this implementation
        does.
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
    def break_up(self) -> None:
        """Makes this process's wait for ranks that have ended end with an error, now or later. It is called on another
        thread."""

    @abstractmethod
    def compile(
        self,
        forward: Callable[[StepInputs], Value],
        logits: Callable[[Value], Value],
        step: StepInputs,
        max_rows: int,
        is_trial: bool = False,
        final_states: Callable[[Value], Value] | None = None,
    ) -> CompiledModel:
        """Makes `forward` (the step's tokens to hidden states of its outputs) and `logits` (rows of those to logits)
        runnable, and `final_states` (rows of those to others), if it is given. With `is_trial` the result only serves
        to measure how much memory a step needs; it may be slow."""


class CompiledModel(ABC):
    @abstractmethod
    def forward(self) -> torch.Tensor:
        """Runs the step that the StepInputs hold. Returns hidden states, [num_outputs, hidden].

        The result is overwritten by the next call.
        """

    @abstractmethod
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns float32 logits [len(rows), vocab] of the given rows (int32) of the latest hidden states.

        len(rows) <= max_rows. The result is overwritten by the next call.
        """

    @abstractmethod
    def final_states(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns float32 [len(rows), width] of the given rows, as `logits` does. Raises RuntimeError if it was
        compiled without."""

    def likeliest(self, num_rows: int) -> np.ndarray | None:
        """Returns, per row of the latest logits, its likeliest token (the first of them), or BROKEN.

        Returns None where that was not computed with the step: see Ops.argmax. It waits for the device.
        """
        return None

    def confirm(self) -> None:
        """Raises if what was computed up to now may be wrong, because a rank was lost in the middle of it."""
        return
