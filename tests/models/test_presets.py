from __future__ import annotations

import pytest

from alignedserve.models.config import ModelConfig
from alignedserve.models.presets import PRESETS


def num_parameters(config: ModelConfig) -> int:
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    attention = hidden * (heads + 2 * kv_heads) + heads * hidden
    if config.qkv_bias and config.attention_out_bias:
        attention += heads + 2 * kv_heads + hidden
    attention += config.num_heads if config.attention_sinks else 0
    is_opt = config.architecture == "opt"
    mlp = (2 if is_opt else 3) * hidden * config.intermediate_size
    if config.moe is not None:
        assert all(config.moe.layers)
        expert = 3 * hidden * config.moe.intermediate_size
        mlp = config.moe.num_experts * (expert + hidden)
        if config.moe.is_stacked:
            # A router's bias, and an expert's.
            mlp += config.moe.num_experts * (1 + 2 * config.moe.intermediate_size + hidden)
    layer = attention + mlp
    if is_opt:
        # biases, and two layer norms of two vectors
        layer += config.intermediate_size + hidden + 4 * hidden
        ends = config.vocab_size * hidden + (config.max_position + 2) * hidden + 2 * hidden
    else:
        layer += (4 if config.post_norms else 2) * hidden + (2 * config.head_dim if config.qk_norm else 0)
        ends = (1 if config.tie_word_embeddings else 2) * config.vocab_size * hidden + hidden
    return config.num_layers * layer + ends


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("opt-125m", 125_239_296),
        ("opt-2.7b", 2_651_596_800),
        ("opt-6.7b", 6_658_473_984),
        ("opt-13b", 12_853_473_280),
        ("opt-30b", 29_974_540_288),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("mixtral-8x7b", 46_702_792_704),
        ("phi-4", 14_659_507_200),
        # The model card says 20.9 and 116.8 billion.
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        # 4,300,079,472 with 416,866,032 of the vision tower and 2,950,272 of the projector.
        ("gemma-3-4b", 3_880_263_168),
    ],
)
def test_a_preset_has_as_many_parameters_as_the_model(name: str, published: int) -> None:
    assert num_parameters(PRESETS[name]) == published
