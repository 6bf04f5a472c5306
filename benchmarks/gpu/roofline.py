"""The least time that a decode step can take: bytes that must be read over bandwidth, or FLOPs over the matrix rate.

    bytes = every weight once (of the input embedding, the rows of the batch) + KV of all prefixes + KV written
    FLOPs = 2 * weights of matrices * batch + 4 * query heads * head_dim * layers * sum of prefixes

Activations are left out: a few MB beside tens of GB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.models.config import ModelConfig


@dataclass(frozen=True)
class Work:
    num_bytes: float
    num_flops: float

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        return max(self.num_bytes / bytes_per_s, self.num_flops / flops_per_s)


def decode_work(config: ModelConfig, lengths: Sequence[int], value_bytes: int) -> Work:
    """`lengths`: tokens attended to by each sequence, its new one included."""
    batch, num_kv_tokens = len(lengths), attended(config, lengths)
    num_rows = batch * (2 if config.architecture == "opt" else 1)
    values = (
        matrix_values(config)
        + vector_values(config)
        + num_rows * (config.embedding_dim or config.hidden_size)
        + (num_kv_tokens / config.num_layers + batch) * kv_values_per_token(config)
    )
    attention_flops = 4 * config.num_heads * config.head_dim * num_kv_tokens
    return Work(values * value_bytes, 2 * matrix_values(config) * batch + attention_flops)


def attended(config: ModelConfig, lengths: Sequence[int]) -> int:
    """Tokens, all layers together."""
    windows = config.sliding_windows or (None,) * config.num_layers
    return sum(
        sum(length if window is None else min(length, window) for length in lengths) for window in windows
    )


def kv_values_per_token(config: ModelConfig) -> int:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim


def matrix_values(config: ModelConfig) -> int:
    """Of the matrices that every token goes through, the output layer's included. Raises ValueError for a mixture of
    experts: which of them are read depends on the batch."""
    if config.moe:
        raise ValueError(f"{config.architecture}: the floor of a mixture of experts is not worked out")
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    num_mlp_matrices = 2 if config.architecture == "opt" else 3
    layer = hidden * (q_size + 2 * kv_size) + q_size * hidden + num_mlp_matrices * hidden * inner
    width = config.embedding_dim or hidden
    projections = 2 * width * hidden if width != hidden else 0
    return config.num_layers * layer + config.vocab_size * width + projections


def vector_values(config: ModelConfig) -> int:
    """Norms and biases."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    is_opt = config.architecture == "opt"
    norm = 2 * hidden if is_opt else hidden
    layer = (4 if config.post_norms else 2) * norm * config.norm_affine
    layer += config.qkv_bias * (q_size + 2 * kv_size) + config.attention_out_bias * hidden
    layer += config.mlp_bias * ((inner if is_opt else 2 * inner) + hidden)
    layer += config.qk_norm * 2 * config.head_dim
    return config.num_layers * layer + norm * (config.norm_affine and config.final_norm)
