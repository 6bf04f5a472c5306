"""Random models of every family, small enough to build in a test, and what transformers says they generate."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests import layer_with_state  # noqa: F401
from tests.hf_fading_sum import FadingSumConfig

VOCAB_SIZE = 200
MAX_LEN = 512
PROMPT_LENGTHS = (1, 2, 7, 16, 17, 33, 64, 150, 300)
NUM_NEW = 64

# Weights as large as these make attention and every layer matter; transformers' default of 0.02 barely does.
_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=MAX_LEN,
    initializer_range=0.15,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
)
_GATED: dict[str, Any] = _COMMON | dict(intermediate_size=96, num_key_value_heads=2)
_LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_QWEN3_MOE: dict[str, Any] = _GATED | dict(
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40, head_dim=32
)

_YARN_ROPE = dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=64)

_GEMMA3: dict[str, Any] = _GATED | dict(
    head_dim=32, sliding_window=24, sliding_window_pattern=2, query_pre_attn_scalar=16
)

# Inner values which two ranks have whole groups of 32 of.
_GPT_OSS: dict[str, Any] = _COMMON | dict(
    intermediate_size=64,
    num_key_value_heads=2,
    head_dim=32,
    num_local_experts=8,
    num_experts_per_tok=3,
    sliding_window=24,
    rope_parameters=_YARN_ROPE | dict(truncate=False),
)

_VISION = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=32,
    patch_size=8,
)

CONFIGS: dict[str, Any] = {
    "llama-mha": lambda: LlamaConfig(**_GATED | dict(num_key_value_heads=4)),
    "llama-gqa-tied": lambda: LlamaConfig(**_GATED, tie_word_embeddings=True),
    "llama3-rope": lambda: LlamaConfig(
        **_GATED, rope_parameters=_LLAMA3_ROPE, mlp_bias=True, attention_bias=True
    ),
    "llama-yarn": lambda: LlamaConfig(**_GATED, rope_parameters=_YARN_ROPE),
    "mistral-window": lambda: MistralConfig(**_GATED, sliding_window=24),
    "ministral": lambda: MinistralConfig(
        **_GATED,
        head_dim=24,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen2": lambda: Qwen2Config(**_GATED, tie_word_embeddings=True),
    "qwen2-window": lambda: Qwen2Config(
        **_GATED, use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**_GATED, head_dim=32),
    "qwen3-moe": lambda: Qwen3MoeConfig(**_QWEN3_MOE, norm_topk_prob=True),
    "qwen3-moe-unnormed": lambda: Qwen3MoeConfig(
        **_QWEN3_MOE, norm_topk_prob=False, mlp_only_layers=[0], decoder_sparse_step=1
    ),
    "mixtral": lambda: MixtralConfig(**_GATED, num_local_experts=4, num_experts_per_tok=2),
    "mixtral-window": lambda: MixtralConfig(**_GATED, num_local_experts=5, sliding_window=24),
    "phi3": lambda: Phi3Config(**_GATED | dict(num_key_value_heads=4, partial_rotary_factor=0.5)),
    "phi3-partial-window": lambda: Phi3Config(
        **_GATED | dict(partial_rotary_factor=0.75), sliding_window=24, tie_word_embeddings=True
    ),
    "phi3-longrope": lambda: Phi3Config(
        **_GATED,
        original_max_position_embeddings=32,
        rope_parameters=dict(
            rope_type="longrope",
            short_factor=[1.0 + i / 4 for i in range(8)],
            long_factor=[1.5 + i * i for i in range(8)],
        ),
    ),
    "gemma3": lambda: Gemma3TextConfig(**_GEMMA3),
    # Its checkpoint has a vision tower too.
    "gemma3-sees": lambda: Gemma3Config(
        text_config=_GEMMA3, vision_config=_VISION, mm_tokens_per_image=4, image_token_index=VOCAB_SIZE
    ),
    "gemma3-listed-scaled": lambda: Gemma3TextConfig(
        **_GEMMA3 | dict(attention_bias=True, query_pre_attn_scalar=9),
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=4.0, rope_theta=50000.0),
            sliding_attention=dict(rope_type="default", rope_theta=5000.0),
        ),
    ),
    "gpt-oss": lambda: GptOssConfig(**_GPT_OSS, swiglu_limit=1.5, swiglu_alpha=1.4),
    "gpt-oss-listed": lambda: GptOssConfig(
        **_GPT_OSS
        | dict(
            num_local_experts=4,
            attention_bias=False,
            head_dim=24,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            rope_parameters=_YARN_ROPE,
        ),
    ),
    # The first and the last layer have a state, or all.
    "fading-sum": lambda: FadingSumConfig(**_GATED, state_layers=(0, 2)),
    "fading-sum-alone": lambda: FadingSumConfig(**_GATED, state_layers=(0, 1, 2), tie_word_embeddings=True),
    "opt": lambda: OPTConfig(**_COMMON, ffn_dim=128, word_embed_proj_dim=64, init_std=0.15),
    "opt-post-norm": lambda: OPTConfig(
        **_COMMON, ffn_dim=128, word_embed_proj_dim=48, do_layer_norm_before=False, init_std=0.15
    ),
}


def build(name: str, directory: Path) -> Path:
    """Saves the model (float32) and returns its directory."""
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager")
    _make_biases_and_norms_matter(model)
    model.save_pretrained(directory)
    return directory


def _make_biases_and_norms_matter(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            # As large as the sum over some tens of keys.
            parameter.data = 3 + torch.randn_like(parameter)
        elif parameter.ndim == 1 or name.endswith("_bias"):
            spread = torch.randn_like(parameter) * 0.2
            # Gemma adds one to the weights of its norms.
            is_around_zero = name.endswith("bias") or "Gemma" in type(model).__name__
            parameter.data = spread if is_around_zero else 1 + spread


@cache
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]


@cache
def oracle(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    return model


@cache
def greedy(directory: Path, num_new: int = NUM_NEW) -> list[list[int]]:
    """What transformers generates for `prompts()`, one prompt at a time.

    All prompts at once are a draft, in a third of the time: of each prompt it counts if one pass over this prompt and
    its draft alone has every token of the draft as the likeliest.
    """
    model = oracle(directory)
    if "longrope" in str(model.config):
        # What a token's K and V are depends on how long the sequence was when they were computed.
        return [_generated([prompt], model, num_new)[0] for prompt in prompts()]
    drafts = _generated(prompts(), model, num_new)
    return [
        draft if _is_likeliest(draft, prompt, directory) else _generated([prompt], model, num_new)[0]
        for prompt, draft in zip(prompts(), drafts, strict=True)
    ]


def _generated(some: Sequence[list[int]], model: PreTrainedModel, num_new: int) -> list[list[int]]:
    longest = max(map(len, some))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in some])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in some])
    out = model.generate(  # type: ignore[operator]
        ids, attention_mask=mask, do_sample=False, max_new_tokens=num_new, eos_token_id=None, pad_token_id=0
    )
    found: list[list[int]] = out[:, longest:].tolist()
    return found


def _is_likeliest(draft: list[int], prompt: list[int], directory: Path) -> bool:
    likeliest = logprobs(directory, prompt + draft[:-1])[len(prompt) - 1 :].argmax(dim=-1)
    return likeliest.tolist() == draft


@torch.inference_mode()
def logprobs(directory: Path, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocab] log-probabilities of what follows each token."""
    logits: torch.Tensor = oracle(directory)(torch.tensor([token_ids])).logits
    return logits[0].float().log_softmax(dim=-1)


@cache
@torch.inference_mode()
def embeddings(
    directory: Path, pooling: str, wanted: tuple[tuple[int, ...], ...] | None = None
) -> np.ndarray[Any, Any]:
    """One row for each prompt: what transformers' last hidden states yield, scaled to length 1."""
    model, rows = oracle(directory).base_model, []
    for prompt in wanted or prompts():
        states = model(torch.tensor([list(prompt)])).last_hidden_state[0].double()
        row = states[-1] if pooling == "last" else states.mean(dim=0)
        rows.append((row / row.norm()).float().numpy())
    return np.stack(rows)
