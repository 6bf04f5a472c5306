"""The mixture of experts in a Hugging Face config.json."""

from __future__ import annotations

from alignedserve.models.config import MoeConfig
from alignedserve.models.fields import Fields

# The kernel that chooses a row's experts looks at all of them at once.
MAX_EXPERTS = 1024


def read_moe(
    fields: Fields,
    intermediate_size: int,
    normalises: bool,
    layers: tuple[bool, ...],
    num_experts: int,
    top_k: int,
) -> MoeConfig:
    """Reads the mixture. `num_experts` and `top_k` are the family's defaults for absent keys."""
    # Both spellings occur, and transformers treats them as one.
    key = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
    num_experts = fields.size(key, num_experts, most=MAX_EXPERTS)
    top_k = fields.size("num_experts_per_tok", top_k)
    if top_k > num_experts:
        raise fields.error("num_experts_per_tok", f"at most {key}, which is {num_experts}")
    return MoeConfig(num_experts, top_k, intermediate_size, normalises, layers)


def mixture_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Which layers are mixtures, in Qwen's terms: every `decoder_sparse_step`-th one, except those in
    `mlp_only_layers`."""
    every = fields.size("decoder_sparse_step", 1)
    plain = [] if fields.get("mlp_only_layers") is None else fields.get("mlp_only_layers")
    if not isinstance(plain, list) or any(type(layer) is not int or layer < 0 for layer in plain):
        raise fields.error("mlp_only_layers", "a list of layers, counted from 0")
    return tuple(layer not in plain and (layer + 1) % every == 0 for layer in range(num_layers))
