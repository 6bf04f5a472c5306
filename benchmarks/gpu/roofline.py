"""The least time of a decode step: bytes that must be read over bandwidth, or FLOPs over the matrix rate.

    bytes = every weight once (the batch's rows of the input embedding) + KV of all prefixes + KV written
    FLOPs = 2 * matrix weights * batch + 4 * query heads * head_dim * layers * sum of prefixes

In a mixture of E experts, the expected number of experts read is E * (1 - (1 - k/E)^batch), if each row chooses k of
them evenly. FLOPs are those of k experts per row.

Activations are left out: a few MB beside tens of GB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.models.config import ModelConfig
from alignedserve.ops.base import BYTES_PER_WEIGHT
from alignedserve.timing.cost import ExpertCounts


@dataclass(frozen=True)
class Work:
    num_bytes: float
    num_flops: float

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        return max(self.num_bytes / bytes_per_s, self.num_flops / flops_per_s)


def decode_work(
    config: ModelConfig, lengths: Sequence[int], value_bytes: int, quantization: str | None = None
) -> Work:
    """`lengths`: tokens that each sequence attends to, including its new one. `quantization`: of the matrices and
    experts."""
    batch, num_kv_tokens = len(lengths), attended(config, lengths)
    num_rows = batch * (2 if config.architecture == "opt" else 1)
    experts = expert_values(config)
    expert_bytes = BYTES_PER_WEIGHT[quantization] if quantization else value_bytes
    values = (
        vector_values(config)
        + num_rows * (config.embedding_dim or config.hidden_size)
        + (num_kv_tokens / config.num_layers + batch) * kv_values_per_token(config)
    )
    attention_flops = 4 * config.num_heads * config.head_dim * num_kv_tokens
    row_values = matrix_values(config) + experts * (config.moe.top_k if config.moe else 0)
    num_bytes = (
        values * value_bytes
        + experts * hit_experts(config, batch) * expert_bytes
        + matrix_bytes(config, value_bytes, quantization)
    )
    return Work(num_bytes, 2 * row_values * batch + attention_flops)


def chunk_work(
    config: ModelConfig, before: int, count: int, value_bytes: int, quantization: str | None = None
) -> Work:
    """Returns the work of `count` prompt tokens, the last of which yields a token, after `before` tokens with KV."""
    decodes = decode_work(config, [before + count], value_bytes, quantization)
    experts = expert_values(config)
    head = config.vocab_size * (config.embedding_dim or config.hidden_size)
    row_values = matrix_values(config) - head + experts * (config.moe.top_k if config.moe else 0)
    pairs = sum(attended(config, [before + place]) for place in range(1, count + 1))
    expert_bytes = BYTES_PER_WEIGHT[quantization] if quantization else value_bytes
    hit = hit_experts(config, count) - hit_experts(config, 1)
    num_bytes = decodes.num_bytes + experts * hit * expert_bytes
    num_flops = 2 * row_values * count + 2 * head + 4 * config.num_heads * config.head_dim * pairs
    return Work(num_bytes, num_flops)


def attended(config: ModelConfig, lengths: Sequence[int]) -> int:
    """Returns the number of tokens attended to, summed over layers."""
    windows = config.sliding_windows or (None,) * config.num_layers
    return sum(
        sum(length if window is None else min(length, window) for length in lengths) for window in windows
    )


def kv_values_per_token(config: ModelConfig) -> int:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim


def matrix_values(config: ModelConfig) -> int:
    """Returns the number of values in matrices that every token uses, including the output layer but not the
    experts."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    num_mlp_matrices = 2 if config.architecture == "opt" else 3
    layer = hidden * (q_size + 2 * kv_size) + q_size * hidden
    num_mixtures = sum(config.moe.layers) if config.moe else 0
    mlps = (config.num_layers - num_mixtures) * num_mlp_matrices * hidden * inner
    width = config.embedding_dim or hidden
    projections = 2 * width * hidden if width != hidden else 0
    return config.num_layers * layer + mlps + router_values(config) + config.vocab_size * width + projections


def matrix_bytes(config: ModelConfig, value_bytes: int, quantization: str | None) -> float:
    """The output layer has at least a byte per weight, and routers are not quantised."""
    num_values = matrix_values(config)
    if quantization is None:
        return num_values * value_bytes
    head = config.vocab_size * (config.embedding_dim or config.hidden_size)
    routers = router_values(config)
    coded = (num_values - head - routers) * BYTES_PER_WEIGHT[quantization] + head
    return coded + routers * value_bytes


def router_values(config: ModelConfig) -> int:
    return sum(config.moe.layers) * config.hidden_size * config.moe.num_experts if config.moe else 0


def expert_values(config: ModelConfig) -> int:
    """Returns the number of values in one expert of every mixture."""
    if config.moe is None:
        return 0
    return sum(config.moe.layers) * 3 * config.hidden_size * config.moe.intermediate_size


def hit_experts(config: ModelConfig, batch: int) -> float:
    """Returns how many experts in each mixture a batch is expected to use."""
    if config.moe is None:
        return 0.0
    return config.moe.num_experts * ExpertCounts(config.moe.num_experts, config.moe.top_k).hit_share(batch)


def vector_values(config: ModelConfig) -> int:
    """Returns the number of values in norms and biases."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    is_opt = config.architecture == "opt"
    norm = 2 * hidden if is_opt else hidden
    layer = (4 if config.post_norms else 2) * norm * config.norm_affine
    layer += config.qkv_bias * (q_size + 2 * kv_size) + config.attention_out_bias * hidden
    layer += config.mlp_bias * ((inner if is_opt else 2 * inner) + hidden)
    layer += config.qk_norm * 2 * config.head_dim
    return config.num_layers * layer + norm * (config.norm_affine and config.final_norm)
