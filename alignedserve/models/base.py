"""The interface of a model to the engine: three functions written in `Ops`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from alignedserve.models.config import ModelConfig
from alignedserve.models.weights import WeightSource
from alignedserve.ops.base import Activation, Experts, Linear, Ops, Value
from alignedserve.ops.experts import ExpertsSpec, TakeExpert
from alignedserve.ops.step import StepInputs


class Model(Protocol):
    config: ModelConfig

    def forward(self, step: StepInputs) -> Value:
        """Returns the hidden states of the step's outputs."""
        ...

    def final_states(self, hidden: Value) -> Value:
        """Applies to some rows of hidden states what comes between the last layer and the head, such as the final
        norm. Embeddings are made of these."""
        ...

    def logits(self, hidden: Value) -> Value:
        """Turns some rows of hidden states into logits over the vocabulary."""
        ...


@dataclass(frozen=True)
class PostNorm:
    """An RMS norm of what a part of a layer yields, before that is added to the residual stream."""

    weight: torch.Tensor
    eps: float


def add_linear(ops: Ops, x: Value, weight: Linear, residual: Value, post_norm: PostNorm | None) -> Value:
    """Returns `residual`, which may be overwritten, plus what the linear layer makes of x."""
    if post_norm is None:
        return ops.linear(x, weight, residual=residual)
    return ops.rms_norm(ops.linear(x, weight), post_norm.weight, post_norm.eps, residual=residual)


class Layers:
    """Takes tensors by their checkpoint names and turns them into the weights that the ops work on."""

    def __init__(self, weights: WeightSource, ops: Ops) -> None:
        self._weights = weights
        self._ops = ops

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Returns the checkpoint's tensor as it is: it is to be copied before much else is taken."""
        return self._weights.take(name, shape)

    def experts(self, spec: ExpertsSpec, take: TakeExpert) -> Experts:
        return self._ops.expert_weights(spec, take)

    def parameter(self, name: str, *shape: int) -> torch.Tensor:
        return self._ops.parameter(self._weights.take(name, shape))

    def norm(self, name: str, width: int, offset: float = 0.0) -> torch.Tensor:
        """Returns a norm's weight, plus `offset`: that sum is kept in float32."""
        if not offset:
            return self.parameter(name, width)
        return self._ops.parameter(self._weights.take(name, (width,)).float() + offset, torch.float32)

    def embedding_and_head(
        self, name: str, vocab_size: int, width: int, is_tied: bool
    ) -> tuple[torch.Tensor | Linear, Linear]:
        """Returns the table that tokens come in by and the layer they leave by; one and the same if they are tied, and
        that layer is not quantised: a table is as exact as the checkpoint has it."""
        if is_tied and self._ops.quantization is None:
            head = self.linear([name], [vocab_size], width, is_head=True)
            return head, head
        if is_tied:
            both = self.tensor(f"{name}.weight", vocab_size, width)
            return self._ops.parameter(both), self._ops.linear_weight([both], is_head=True)
        head = self.linear(["lm_head"], [vocab_size], width, is_head=True)
        return self.parameter(f"{name}.weight", vocab_size, width), head

    def linear(
        self,
        names: list[str],
        out_features: list[int],
        in_features: int,
        bias: bool = False,
        activation: Activation = Activation.NONE,
        is_head: bool = False,
    ) -> Linear:
        """Makes one layer out of several in the checkpoint, side by side."""
        parts = [
            self._weights.take(f"{name}.weight", (out, in_features))
            for name, out in zip(names, out_features, strict=True)
        ]
        biases = [
            self._weights.take(f"{name}.bias", (out,))
            for name, out in zip(names, out_features, strict=True)
            if bias
        ]
        return self._ops.linear_weight(parts, biases or None, activation, is_head)

    def linear_split(
        self,
        name: str,
        out_features: list[int],
        in_features: int,
        bias: bool = False,
        activation: Activation = Activation.NONE,
    ) -> Linear:
        """Makes one layer out of one in the checkpoint which holds several, side by side."""
        weight = self._weights.take(f"{name}.weight", (sum(out_features), in_features))
        bias_of_all = self._weights.take(f"{name}.bias", (sum(out_features),)) if bias else None
        return self._ops.linear_weight(
            torch.split(weight, out_features),
            None if bias_of_all is None else torch.split(bias_of_all, out_features),
            activation,
        )
