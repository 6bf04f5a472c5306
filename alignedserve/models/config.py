"""A model's configuration, independent of its source (a config.json or a preset)."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.kv.groups import STATE_WINDOW
from alignedserve.models.quantised.config import QuantisedConfig


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: its base frequency, and how frequencies are rescaled for sequences longer than in the original
    training."""

    theta: float = 10000.0
    # The share of each head that is rotated: its first values.
    partial_rotary_factor: float = 1.0
    # "default", "linear", "llama3", "yarn" or "longrope".
    kind: str = "default"
    factor: float = 1.0
    # The original length (llama3, yarn, longrope).
    original_max_position: int = 8192
    # The wavelengths between which frequencies are blended (llama3).
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # The turns within the original length between which frequencies are blended. `truncate` rounds both ends of that
    # range to whole frequencies (yarn).
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    # The factor of cosines and sines (yarn, longrope).
    attention_factor: float = 1.0
    # The divisor of each frequency: if sequences are limited to the original length, and if they are not (longrope).
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts: many gated MLPs, and each token goes through a few of them."""

    num_experts: int
    # Experts per token.
    top_k: int
    # The inner width of one expert.
    intermediate_size: int
    # Whether the weights of a token's experts are scaled to sum to one.
    normalises: bool
    # One entry per layer: whether its MLP is a mixture. Others have an MLP of ModelConfig.intermediate_size.
    layers: tuple[bool, ...]
    # For gpt-oss only. One checkpoint tensor holds gates and ups of all experts, alternating, and another one the
    # downs. All layers have biases, also the router.
    is_stacked: bool = False
    # Alpha and limit of the clamped SwiGLU; None: silu(gate) * up. See ops/experts.py.
    clamped_swiglu: tuple[float, float] | None = None


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
    # The longest sequence that the model supports.
    max_position: int
    norm_eps: float
    # "silu" (gated), "gelu_tanh_gated", "relu", "gelu" (exact) or "gelu_tanh".
    activation: str
    # The checkpoint's dtype: "float32", "bfloat16" or "float16".
    dtype: str
    tie_word_embeddings: bool = False
    rope: RopeConfig | None = None
    # The rope of sliding layers, if it differs.
    local_rope: RopeConfig | None = None
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    # The checkpoint stores q, k and v as one tensor, and gate and up as one (Phi-3).
    fused_projections: bool = False
    # An RMS norm over each head of q and k (Qwen3).
    qk_norm: bool = False
    # One logit per head that takes part in the softmax without a value (gpt-oss).
    attention_sinks: bool = False
    moe: MoeConfig | None = None
    # None: the checkpoint's linear layers are in floating point.
    quantised: QuantisedConfig | None = None
    # One entry per layer: latest tokens that a token attends to, itself included; None for all.
    sliding_windows: tuple[int | None, ...] = ()
    # One entry per layer: bytes of its state, which it has in place of K and V; 0: it attends. Empty: all layers do.
    state_bytes: tuple[int, ...] = ()
    # For Gemma only. Added to the weight of each norm.
    norm_offset: float = 0.0
    # Whether the outputs of attention and MLP are normed before they are added.
    post_norms: bool = False
    # The factor of embeddings, in the model's dtype.
    embedding_scale: float = 1.0
    # Scores are divided by its square root. None: head_dim.
    query_pre_attn_scalar: float | None = None
    # For OPT only. norm_before is False for the post-norm 350m, which also has a narrower embedding.
    norm_before: bool = True
    final_norm: bool = True
    norm_affine: bool = True
    embedding_dim: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def has_state(self) -> bool:
        return any(self.state_bytes)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """One entry per layer: latest tokens of which a token reads blocks, its own included; None for all. Raises
        ValueError for layers with a window beside layers with a state."""
        if not self.has_state:
            return self.sliding_windows
        if any(self.sliding_windows):
            raise ValueError("layers with a sliding window beside layers with a state are not supported")
        return tuple(STATE_WINDOW if num_bytes else None for num_bytes in self.state_bytes)

    @property
    def window(self) -> int:
        """Latest tokens that a token reads in any layer, itself included; 0: some layer reads all."""
        windows = [each or 0 for each in self.windows]
        return max(windows) if windows and all(windows) else 0
