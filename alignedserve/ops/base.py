"""The operations that models are written in, and the contract of the backends that execute them.

A model's forward is a sequence of these calls and nothing else. A backend may therefore run them one by one (`torch`),
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
from alignedserve.kv.groups import GroupedLayer, LayerGroups, one_group
from alignedserve.ops.adapters import LayerAdapters
from alignedserve.ops.experts import ExpertsSpec, TakeExpert
from alignedserve.ops.quantise import Part
from alignedserve.ops.shard import Shard, Split
from alignedserve.ops.states import StateSpec
from alignedserve.ops.step import StepInputs
from alignedserve.ops.truncate import truncate
from alignedserve.sampling_params import SamplingParams

# By the possible values of `quantization`.
BYTES_PER_WEIGHT = {INT8: 1.0, INT4: int4.BYTES_PER_WEIGHT, FP8: 1.0}
# Stands for a token if the logits contain NaN or infinity.
BROKEN = -1


class Activation(Enum):
    NONE = "none"
    RELU = "relu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    # The weight's two parts are gate and up: silu(gate) * up, half as wide as the weight. The next one uses gelu_tanh.
    SILU_GATED = "silu"
    GELU_TANH_GATED = "gelu_tanh_gated"

    @property
    def is_gated(self) -> bool:
        return self in (Activation.SILU_GATED, Activation.GELU_TANH_GATED)


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention, between its qkv projection and its output projection."""

    # The layer's number in the model.
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    # Latest tokens that a token attends to, itself included; None for all.
    sliding_window: int | None = None
    # [max_position, rotary_dim] float32: cos of rotary_dim/2 angles, then sin of the same angles, for the first
    # rotary_dim values of a head. None for no rotation.
    rope: torch.Tensor | None = None
    # Qwen3's RMS norm weights [head_dim] for q and k, applied per head before the rotation.
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_eps: float = 1e-6
    # [num_heads]: one logit per head that takes part in the softmax without a value; None for none.
    sinks: torch.Tensor | None = None
    # Set for the last layer: only the rows of outputs are needed from it on.
    outputs_only: bool = False


def check_rotary_dim(rope: torch.Tensor, head_dim: int) -> None:
    rotary_dim = rope.shape[1]
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise ValueError(f"rope must be an even number of values wide, at most {head_dim}, not {rotary_dim}")


def check_groups(cache: torch.Tensor, groups: LayerGroups | None) -> LayerGroups:
    """Returns the groups of layers in the cache. By default one group has all its layers."""
    num_layers = cache.shape[1]
    groups = one_group(num_layers) if groups is None else groups
    if groups.num_layers != num_layers:
        raise ValueError(f"cache must have the {groups.num_layers} layers of a group, not {num_layers}")
    return groups


def place_of(layer: int, groups: LayerGroups, step: StepInputs) -> GroupedLayer:
    """Returns the place of the layer's KV, or of its state, in the cache."""
    if step.num_groups != groups.num_groups:
        raise ValueError(f"StepInputs must have {groups.num_groups} groups of layers, not {step.num_groups}")
    if not 0 <= layer < len(groups.layers):
        raise ValueError(f"layer must be below the cache's {len(groups.layers)}, not {layer}")
    return groups.layers[layer]


# A backend's own handles of a value or a weight. They are opaque to models.
Value = Any
Linear = Any
Experts = Any


@dataclass(frozen=True)
class Projected:
    """The input and weight of a layer's qkv projection. If `x` is kept, K and V are projected from it again later."""

    x: Value
    weight: Linear


class Ops(ABC):
    name: str
    device: torch.device
    dtype: torch.dtype
    # How linear layers store their weights; None: in the dtype.
    quantization: str | None = None
    # The part of the model that this process has.
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
        """Makes a linear layer with the output columns of all `parts` ([out, in] each) side by side.

        The parts are all floats, or all quantised; quantised ones keep their codes. Those of GGUF files may differ, and
        keep their codes on a CPU with rows in bfloat16. `activation` is applied to the
        output. The parts are copied, never kept: the caller may free them. The head yields logits, which choose between
        many tokens, so it keeps at least eight bits. `split`: what this rank's layer is a part of. If inputs are split,
        there is no activation, and only one rank has the biases. If outputs are split, all ranks have equally many, and
        the first `num_outputs` of all of them count.
        """

    @abstractmethod
    def with_adapters(self, weight: Linear, adapters: LayerAdapters) -> Linear:
        """Returns the linear layer with adapters, which are copied. `StepInputs.adapters` has the adapter of each row.

        Such a layer may be used in `forward` only. Its rows there are the step's tokens or its outputs.
        """

    @abstractmethod
    def put_adapter(self, weight: Linear, number: int, adapter: LayerAdapters) -> None:
        """Puts one adapter, of the rank of all, in the place of adapter `number` of the layer. Any thread may call it
        while the layer is used by rows of other adapters."""

    def scheme(self, is_head: bool) -> str | None:
        """How a linear layer stores its weight; None: in the dtype."""
        return INT8 if is_head and self.quantization == INT4 else self.quantization

    @abstractmethod
    def parameter(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns a copy on this backend's device, in `dtype` or else in the backend's. The given tensor may be a
        view of a mapped file."""

    @abstractmethod
    def bind_cache(self, cache: torch.Tensor, groups: LayerGroups | None = None) -> None:
        """Sets the KV cache that `attention` reads and writes: [block, layer of a group, k|v, kv_head, slot, row].

        A layer's KV is in the blocks of its group. The step has a block table and slots for each group. Without
        `groups`, all layers are one group.

        The cache's dtype determines the contents of a row: head_dim values, or 8 bits for each (`kernels/kv_rows.py`).
        `attention` reads 8-bit values back as it wrote them, also for tokens of the same step. Called once, before
        `compile`.
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

        The table may be the weight of a linear layer that is not quantised, or is in a type of GGUF, and has no
        activation. Tied embeddings are then stored once.
        """

    @abstractmethod
    def rms_norm(self, x: Value, weight: torch.Tensor, eps: float, residual: Value | None = None) -> Value:
        """Returns the norm of x times `weight`, plus `residual` if given, which may be overwritten. Here and in
        AttentionSpec, weights of norms are in the backend's dtype or in float32."""

    @abstractmethod
    def layer_norm(
        self, x: Value, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> Value: ...

    @abstractmethod
    def linear(self, x: Value, weight: Linear, residual: Value | None = None) -> Value:
        """Returns activation(x @ weight.T + bias), plus `residual` if given. Never both an activation and a residual.

        A row's adapter is added before the activation. The residual may be overwritten: the caller does not need it
        afterwards. If a layer's inputs are split over ranks, `x` has this rank's inputs, and every rank gets the whole
        result. If its outputs are split, the leading rank gets all of them; the result on other ranks is undefined.
        """

    @abstractmethod
    def expert_weights(self, spec: ExpertsSpec, take: TakeExpert) -> Experts:
        """Copies all experts. They are taken one by one in ascending order, and not kept."""

    @abstractmethod
    def mix_experts(self, x: Value, logits: Value, experts: Experts, residual: Value) -> Value:
        """Returns, per row, the weighted sum of its experts' outputs for `x`, plus `residual`, which may be
        overwritten.

        `logits` is [rows, experts]: see `choose_experts`. A row's result does not depend on the other rows.
        """

    @abstractmethod
    def attention(self, qkv: Value, spec: AttentionSpec, projected: Projected | None = None) -> Value:
        """Norms and rotates q and k, writes k and v into the cache at the step's slots, and attends causally.

        For sequences with kept inputs it writes `projected.x` instead, and restores the K and V that they attend to.
        `qkv` is [tokens, (num_heads + 2 * num_kv_heads) * head_dim]: q heads, k heads, v heads. Returns [tokens,
        num_heads * head_dim], or [outputs, ...] if `spec.outputs_only`.
        """

    def state(self, x: Value, spec: StateSpec) -> Value:
        """Advances the layer's state with each token's row of `x` [tokens, inputs]. Returns [tokens, spec.width], or
        [outputs, spec.width] if `spec.outputs_only`."""
        raise ValueError(
            f"{self.name} has no kernel for layers with a state: attention_backend='torch' runs them"
        )

    @abstractmethod
    def outputs(self, x: Value) -> Value:
        """Returns the rows of the step's outputs, [tokens, width] to [outputs, width]. Later operations use these
        rows only."""

    @abstractmethod
    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns, per row, the first of the largest logits, and whether the row contains NaN or its maximum is not
        finite.

        Not traced.
        """

    @abstractmethod
    def gumbel_argmax(self, logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Returns, per row, a token drawn from softmax(logits). The noise depends only on the row's key (int64).

        Not traced.
        """

    def draw(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns, per row, the sampled token, and whether the row is broken, as in `argmax`.

        Temperature, top_k, top_p and min_p of the row apply, with the noise of its key. It changes the logits and is
        not traced. A backend should not wait for its device here; this implementation does.
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
        """Ends this process's waits for other ranks with an error, now and later. Called on another thread."""

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
        """Makes a runnable model of `forward`, `logits` and, if given, `final_states`.

        `forward` maps the step's tokens to hidden states of its outputs; `logits` maps rows of these to logits,
        `final_states` to other states. With `is_trial` the result only serves to measure a step's memory; it may be
        slow.
        """


class CompiledModel(ABC):
    @abstractmethod
    def forward(self) -> torch.Tensor:
        """Runs the step in the StepInputs. Returns hidden states, [num_outputs, hidden].

        The result is overwritten by the next call.
        """

    @abstractmethod
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns float32 logits [len(rows), vocab] of the given rows (int32) of the latest hidden states.

        len(rows) <= max_rows. The result is overwritten by the next call.
        """

    @abstractmethod
    def final_states(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns float32 [len(rows), width] of the given rows, like `logits`. Raises RuntimeError if the model was
        compiled without final_states."""

    def likeliest(self, num_rows: int) -> np.ndarray | None:
        """Returns the likeliest token (the first of equals) of each row of the latest logits, or BROKEN.

        Returns None if it was not computed with the step: see Ops.argmax. It waits for the device.
        """
        return None

    def confirm(self) -> None:
        """Raises if a result so far may be wrong, because a rank was lost while it was computed."""
        return
