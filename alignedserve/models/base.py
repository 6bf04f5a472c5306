"""The interface of a model to the engine: three functions, written in `Ops`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from alignedserve.models.config import ModelConfig
from alignedserve.models.lora import AdaptedLayer, AdaptedSource
from alignedserve.models.weights import TakePart, WeightSource
from alignedserve.ops.base import Activation, Experts, Linear, Ops, Value
from alignedserve.ops.experts import ExpertsSpec, TakeExpert
from alignedserve.ops.quantise import GgufWeight, Part, QuantisedWeight, inputs_of, outputs_of
from alignedserve.ops.shard import WHOLE, RankPart, Shard, Split
from alignedserve.ops.step import StepInputs


class Model(Protocol):
    config: ModelConfig

    def forward(self, step: StepInputs) -> Value:
        """Returns the hidden states of the step's outputs."""
        ...

    def final_states(self, hidden: Value) -> Value:
        """Applies everything between the last layer and the head, such as the final norm, to rows of hidden states.
        Embeddings are made of the result."""
        ...

    def logits(self, hidden: Value) -> Value:
        """Turns rows of hidden states into logits over the vocabulary."""
        ...


@dataclass(frozen=True)
class PostNorm:
    """An RMS norm of a layer part's output, before it is added to the residual stream."""

    weight: torch.Tensor
    eps: float


def add_linear(ops: Ops, x: Value, weight: Linear, residual: Value, post_norm: PostNorm | None) -> Value:
    """Returns `residual` plus the linear layer's output for x. `residual` may be overwritten."""
    if post_norm is None:
        return ops.linear(x, weight, residual=residual)
    return ops.rms_norm(ops.linear(x, weight), post_norm.weight, post_norm.eps, residual=residual)


def _check_alike(names: list[str], parts: list[Part]) -> None:
    """Raises ValueError if only some of the weights that form one layer here are quantised."""
    is_quantised = [isinstance(part, QuantisedWeight) for part in parts]
    if any(is_quantised) and not all(is_quantised):
        coded, plain = names[is_quantised.index(True)], names[is_quantised.index(False)]
        raise ValueError(f"{coded} is quantized and {plain} is not, but they are computed as one layer")


def _split(weight: Part, out_features: list[int]) -> list[Part]:
    ends = accumulate(out_features)
    return [outputs_of(weight, slice(end - out, end)) for out, end in zip(out_features, ends, strict=True)]


class Layers:
    """Takes tensors by their checkpoint names, and turns them into the weights that the ops work on."""

    def __init__(self, weights: WeightSource, ops: Ops) -> None:
        self._weights = weights
        self._ops = ops
        self._adapters = weights.adapters if isinstance(weights, AdaptedSource) else None

    @property
    def shard(self) -> Shard:
        """The part of the model that this rank makes."""
        return self._ops.shard

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Returns the checkpoint's tensor itself. Copy it before taking many others."""
        return self._weights.take(name, shape)

    def experts(self, spec: ExpertsSpec, take: TakeExpert) -> Experts:
        return self._ops.expert_weights(spec, take)

    def weight(self, layer: str, num_out: int, num_in: int) -> Part:
        """Returns a linear layer's weight as the checkpoint stores it. Copy it before taking many others."""
        return self._weights.linear(layer, num_out, num_in)

    def of_experts(self, layer: str, num_experts: int, num_out: int, num_in: int) -> TakePart:
        """Splits a checkpoint's fused expert tensor into one weight per expert."""
        return self._weights.of_experts(layer, num_experts, num_out, num_in)

    def parameter(self, name: str, *shape: int, some: slice | None = None) -> torch.Tensor:
        """Returns a copy of the checkpoint's tensor, or of a slice along its first dimension."""
        tensor = self._weights.take(name, shape)
        return self._ops.parameter(tensor if some is None else tensor[some])

    def norm(self, name: str, width: int, offset: float = 0.0) -> torch.Tensor:
        """Returns a norm's weight plus `offset`. The sum is kept in float32."""
        if not offset:
            return self.parameter(name, width)
        return self._ops.parameter(self._weights.take(name, (width,)).float() + offset, torch.float32)

    def embedding_and_head(
        self, name: str, vocab_size: int, width: int, is_tied: bool
    ) -> tuple[torch.Tensor | Linear, Linear]:
        """Returns the input embedding and the output layer.

        They are one object if they are tied, not quantised, and on one rank: an embedding keeps the checkpoint's
        precision. With `quantization` only the output layer is converted.
        """
        if is_tied and self._ops.quantization is None and self.shard.size == 1:
            head = self._ops.linear_weight([self.weight(name, vocab_size, width)], is_head=True)
            return head, head
        if is_tied:
            both = self.weight(name, vocab_size, width)
            return self._table(both), self._head(both)
        head = self._head(self.weight("lm_head", vocab_size, width))
        return self._table(self.weight(name, vocab_size, width)), head

    def _table(self, weight: Part) -> torch.Tensor | Linear:
        """Makes an input embedding. One in codes is kept like a linear layer's weight."""
        return (
            self._ops.parameter(weight)
            if isinstance(weight, torch.Tensor)
            else self._ops.linear_weight([weight])
        )

    def _head(self, weight: Part) -> Linear:
        """Makes the output layer. With several ranks each has a part of the vocabulary, padded to equal size."""
        num_tokens, width = weight.shape
        if self.shard.size == 1:
            return self._ops.linear_weight([weight], is_head=True)
        mine = self.shard.uneven_part(num_tokens)
        num_filling = self.shard.share(num_tokens) - (mine.stop - mine.start)
        parts = [outputs_of(weight, mine)] if mine.stop > mine.start else []
        if num_filling and isinstance(weight, QuantisedWeight):
            raise ValueError(
                f"lm_head is quantized, and {num_tokens} tokens can't be divided among {self.shard.size} ranks"
            )
        if num_filling and isinstance(weight, torch.Tensor):
            parts.append(weight.new_zeros(num_filling, width))
        if num_filling and isinstance(weight, GgufWeight):
            parts.append(GgufWeight(weight.type, weight.data.new_zeros(num_filling, weight.data.shape[1])))
        return self._ops.linear_weight(parts, is_head=True, split=Split.OUTPUTS, num_outputs=num_tokens)

    def linear(
        self,
        names: list[str],
        out_features: list[int],
        in_features: int,
        bias: bool = False,
        activation: Activation = Activation.NONE,
        mine: RankPart = WHOLE,
        can_adapt: bool = True,
    ) -> Linear:
        """Makes one layer of several in the checkpoint, side by side. With several ranks, this one takes its part.

        `can_adapt`: adapters may change the layer; it must be part of the forward.
        """
        parts = [
            self._weights.linear(name, out, in_features)
            for name, out in zip(names, out_features, strict=True)
        ]
        _check_alike(names, parts)
        biases = [
            self._weights.take(f"{name}.bias", (out,))
            for name, out in zip(names, out_features, strict=True)
            if bias
        ]
        weight = self._part_of(parts, biases, activation, mine)
        if not can_adapt:
            return weight
        return self._adapted(weight, names, out_features, in_features, None, mine)

    def router(self, name: str, num_experts: int, width: int, bias: bool) -> Linear:
        """Makes a mixture's router. No checkpoint quantises it, and no adapter changes it."""
        weight = self._weights.take(f"{name}.weight", (num_experts, width))
        biases = [self._weights.take(f"{name}.bias", (num_experts,))] if bias else None
        return self._ops.linear_weight([weight], biases)

    def linear_split(
        self,
        name: str,
        out_features: list[int],
        in_features: int,
        bias: bool = False,
        activation: Activation = Activation.NONE,
        mine: RankPart = WHOLE,
    ) -> Linear:
        """Makes one layer of a checkpoint's layer that holds several, side by side. With several ranks, this one takes
        its part of each."""
        weight = self._weights.linear(name, sum(out_features), in_features)
        bias_of_all = self._weights.take(f"{name}.bias", (sum(out_features),)) if bias else None
        biases = [] if bias_of_all is None else [*torch.split(bias_of_all, out_features)]
        made = self._part_of(_split(weight, out_features), biases, activation, mine)
        return self._adapted(made, [name], [sum(out_features)], in_features, out_features, mine)

    def _adapted(
        self,
        weight: Linear,
        names: list[str],
        out_features: list[int],
        in_features: int,
        split: list[int] | None,
        mine: RankPart,
    ) -> Linear:
        if self._adapters is None:
            return weight
        adapters = self._adapters.take(names, out_features, in_features)
        if adapters is None:
            return weight
        if split is not None:
            adapters = adapters.split(split)
        weight = self._ops.with_adapters(weight, adapters if self.shard.size == 1 else adapters.of_rank(mine))
        self._adapters.layers.append(AdaptedLayer(names, out_features, in_features, split, weight))
        return weight

    def _part_of(
        self, parts: list[Part], biases: list[torch.Tensor], activation: Activation, mine: RankPart
    ) -> Linear:
        """Makes a layer of this rank's parts."""
        if self.shard.size > 1 and mine.outputs is not None:
            parts = [outputs_of(part, some) for part, some in zip(parts, mine.outputs, strict=True)]
            biases = [each[some] for each, some in zip(biases, mine.outputs, strict=False)]
        if self.shard.size == 1 or mine.inputs is None:
            return self._ops.linear_weight(parts, biases or None, activation)
        parts = [inputs_of(part, mine.inputs) for part in parts]
        own_biases = biases if self.shard.leads else []
        return self._ops.linear_weight(parts, own_biases or None, activation, split=Split.INPUTS)
