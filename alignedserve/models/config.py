"""A model's configuration, independent of where the description came from (a config.json or a preset)."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: its base frequency, and how frequencies are rescaled for longer sequences than a model was
    trained with at first."""

    theta: float = 10000.0
    # How much of each head is rotated: its first values.
    partial_rotary_factor: float = 1.0
    # The kind is "default", "linear", "llama3", "yarn" or "longrope".
    kind: str = "default"
    factor: float = 1.0
    # The length at first (llama3, yarn, longrope).
    original_max_position: int = 8192
    # The two between which wavelengths are blended (llama3).
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # The turns within the original length between which frequencies are blended; `truncate` rounds where that begins
    # and ends to whole frequencies (yarn).
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    # What cosines and sines are multiplied with (yarn, longrope).
    attention_factor: float = 1.0
    # What each frequency is divided by: where sequences may be no longer than the original length, and where they may
    # (longrope).
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts: many gated MLPs, of which each token goes through a few."""

    num_experts: int
    # How many experts each token goes through.
    top_k: int
    # The inner width of one expert.
    intermediate_size: int
    # Whether the weights of a token's experts are scaled to sum to one.
    normalises: bool
    # One entry per layer: whether its MLP is a mixture; the others have an MLP of ModelConfig.intermediate_size.
    layers: tuple[bool, ...]
    # These are for gpt-oss only. The checkpoint has gates and ups of all experts in one tensor, in which they take
    # turns, and downs in another; all layers have biases, the router too.
    is_stacked: bool = False
    # Alpha and limit of the clamped SwiGLU; None: silu(gate) * up. See ops/experts.py.
    clamped_swiglu: tuple[float, float] | None = None


# A layer's pattern that begins so is a regular expression.
REGEX = "re:"


@dataclass(frozen=True)
class QuantisedConfig:
    """How a checkpoint keeps linear layers in fewer bits."""

    # What config.json calls it, such as gptq.
    method: str
    # One of alignedserve.models.quantised.LAYOUTS: which tensors a layer has, and how codes lie in them.
    layout: str
    # One of alignedserve.kernels.quantised: int4, int8, fp8 or mxfp4.
    kind: str
    # How many inputs have one scale; None: all of an output's.
    group: int | None
    # How many outputs have the same scales; None: all.
    num_outputs: int | None = 1
    has_zeros: bool = False
    # How much more a zero is than what is stored.
    zero_offset: int = 0
    # Whether there is a scale for a layer's inputs, which our arithmetic has no use for.
    has_input_scales: bool = False
    # Whether layers without a bias may have one of zeros.
    has_empty_biases: bool = False
    # Names of layers, or patterns of them. Without targets it is all layers.
    targets: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def has(self, layer: str) -> bool:
        """Whether the layer of this name is one of those in fewer bits."""
        is_target = not self.targets or any(_matches(each, layer) for each in self.targets)
        return is_target and not any(_matches(each, layer) for each in self.ignored)


def _matches(pattern: str, layer: str) -> bool:
    if pattern.startswith(REGEX):
        return re.match(pattern.removeprefix(REGEX), layer) is not None
    # A name without what is before it, or of a whole part of the model.
    return f".{pattern}." in f".{layer}."


@dataclass(frozen=True)
class ModelConfig:
    # One of alignedserve.models.registry's names, such as llama or qwen3_moe.
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # The longest sequence that the model was made for.
    max_position: int
    norm_eps: float
    # The activation is "silu" (gated), "gelu_tanh_gated", "relu", "gelu" (exact) or "gelu_tanh".
    activation: str
    # The dtype of the checkpoint: "float32", "bfloat16" or "float16".
    dtype: str
    tie_word_embeddings: bool = False
    rope: RopeConfig | None = None
    # Of the layers which have a window, where it is another than that of the others.
    local_rope: RopeConfig | None = None
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    # The checkpoint has q, k and v in one tensor, and gate and up (Phi-3).
    fused_projections: bool = False
    # An RMS norm over each head of q and k (Qwen3).
    qk_norm: bool = False
    # A logit of each head that takes part in its softmax and has no value (gpt-oss).
    attention_sinks: bool = False
    moe: MoeConfig | None = None
    # None: the checkpoint has linear layers in floating point.
    quantised: QuantisedConfig | None = None
    # One entry per layer: how many of the latest tokens (itself included) a token attends to; None for all.
    sliding_windows: tuple[int | None, ...] = ()
    # These are for Gemma only. What is added to the weight of each norm:
    norm_offset: float = 0.0
    # Whether what attention and MLP yield is normed before it is added.
    post_norms: bool = False
    # What embeddings are multiplied with, in the model's dtype.
    embedding_scale: float = 1.0
    # By the root of what scores are divided, if not of head_dim.
    query_pre_attn_scalar: float | None = None
    # These are for OPT only: norm_before is False for the post-norm 350m, which has a narrower embedding as well.
    norm_before: bool = True
    final_norm: bool = True
    norm_affine: bool = True
    embedding_dim: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def window(self) -> int:
        """How many of the latest tokens a token attends to in every layer, itself included; 0: in some it attends to
        all."""
        windows = [each or 0 for each in self.sliding_windows]
        return max(windows) if windows and all(windows) else 0
