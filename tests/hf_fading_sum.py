"""The made-up model of `layer_with_state.py` as transformers would run it: in one pass over all tokens, without any
cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention


class FadingSumConfig(LlamaConfig):
    model_type = "fading_sum"

    def __init__(self, state_layers: tuple[int, ...] = (), **options: Any) -> None:
        super().__init__(**options)
        self.state_layers = list(state_layers)


class FadingSum(LlamaAttention):
    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, None]:
        seen, kept, added = (project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj))
        state, sums = torch.zeros_like(added[:, 0]), []
        for fades, value in zip(kept.sigmoid().unbind(1), added.unbind(1), strict=True):
            state = fades * state + value
            sums.append(state)
        heads = torch.stack(sums, 1).unflatten(-1, (-1, self.head_dim))
        summed = heads.repeat_interleave(self.num_key_value_groups, dim=2).flatten(2)
        return self.o_proj(summed * seen.sigmoid()), None


class FadingSumForCausalLM(LlamaForCausalLM):
    config_class = FadingSumConfig

    def __init__(self, config: FadingSumConfig) -> None:
        super().__init__(config)
        for layer in config.state_layers:
            self.model.layers[layer].self_attn = FadingSum(config, layer)
        self.post_init()


AutoConfig.register("fading_sum", FadingSumConfig)
AutoModelForCausalLM.register(FadingSumConfig, FadingSumForCausalLM)
