"""A made-up kind of layer that has a state in place of K and V: a sum of what it has seen, which fades as the tokens
say. Importing this makes its family known to the processes of a test.

Everything that such a layer needs is here: the state's size, and how a token changes it.
"""

from __future__ import annotations

from typing import Any

import torch

from alignedserve.models import hf_families, registry
from alignedserve.models.base import add_linear
from alignedserve.models.config import ModelConfig
from alignedserve.models.fields import Fields
from alignedserve.models.llama import Llama, LlamaLayer
from alignedserve.models.weights import WeightSource
from alignedserve.ops.base import Ops, Value
from alignedserve.ops.states import StateSpec

ARCHITECTURE, HF_NAME = "fading_sum", "FadingSumForCausalLM"


def read_family(fields: Fields) -> dict[str, Any]:
    """A Llama, but for the layers in `state_layers`."""
    model = hf_families.FAMILIES["LlamaForCausalLM"](fields)
    num_bytes, layers = 4 * model["num_kv_heads"] * model["head_dim"], fields.get("state_layers")
    state_bytes = tuple(num_bytes if layer in layers else 0 for layer in range(model["num_layers"]))
    return model | {"architecture": ARCHITECTURE, "state_bytes": state_bytes}


class FadingSum(Llama):
    """Layers with a state have the weights of attention: k says what fades, v what is added, and q what is seen."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: Ops, max_model_len: int) -> None:
        super().__init__(config, weights, ops, max_model_len)
        self._num_q = config.num_heads * config.head_dim
        self._num_kv = config.num_kv_heads * config.head_dim

    def _attend(self, layer: LlamaLayer, x: Value) -> Value:
        index = layer.attention.layer
        num_bytes = self.config.state_bytes[index]
        if not num_bytes:
            return super()._attend(layer, x)
        normed = self._ops.rms_norm(x, layer.input_norm, self.config.norm_eps)
        rows = self._ops.linear(normed, layer.qkv)
        is_last = layer.attention.outputs_only
        summed = self._ops.state(rows, StateSpec(index, num_bytes, self._num_q, self._advance, is_last))
        return add_linear(
            self._ops, summed, layer.attention_out, self._ops.outputs(x) if is_last else x, None
        )

    def _advance(self, state: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen, kept, added = row.float().split([self._num_q, self._num_kv, self._num_kv])
        state = kept.sigmoid() * state + added
        heads = state.view(self.config.num_kv_heads, -1)
        num_alike = self.config.num_heads // self.config.num_kv_heads
        return state, heads.repeat_interleave(num_alike, dim=0).flatten() * seen.sigmoid()


hf_families.FAMILIES[HF_NAME] = read_family
registry.MODELS[ARCHITECTURE] = FadingSum
