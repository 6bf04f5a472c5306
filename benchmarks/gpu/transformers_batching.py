"""transformers' continuous batching in its own process: python -m benchmarks.gpu.transformers_batching JOB ANSWER

Without flash-attn, and without a network to download a kernel, its default is `paged|sdpa`: one call over all sequences
with a mask over the KV of all of them. That is not a fair measure of its scheduler. It is therefore also given torch's
FlashAttention as an additional attention function (which transformers has an interface for), called in the same way as
its own `paged|flash_attention_2` calls flash-attn.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from alignedserve.models.config import ModelConfig, RopeConfig
from alignedserve.models.dummy_weights import DummySource

NO_TOKEN = -1

Peer = LlamaForCausalLM | Qwen3ForCausalLM


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    device = torch.device(job["device"])
    model = build(model_config(job["config"]), device, attention_name(job["attention"]))
    found = measure(model, job)
    Path(sys.argv[2]).write_text(json.dumps(found))


def model_config(fields: dict[str, Any]) -> ModelConfig:
    rope = fields["rope"]
    return ModelConfig(**fields | {"rope": None if rope is None else RopeConfig(**rope)})


def build(config: ModelConfig, device: torch.device, attention: str) -> Peer:
    dtype = getattr(torch, config.dtype)
    with torch.device(device):
        model: Peer = AutoModelForCausalLM.from_config(
            their_config(config), dtype=dtype, attn_implementation=attention
        )
    source = DummySource(dtype, device, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.take(name, tuple(parameter.shape)))
    model.eval()
    return model


def their_config(config: ModelConfig) -> LlamaConfig | Qwen3Config:
    kinds: dict[str, type[LlamaConfig] | type[Qwen3Config]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    return kinds[config.architecture](
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters=their_rope(config.rope or RopeConfig()),
    )


def their_rope(rope: RopeConfig) -> dict[str, Any]:
    plain: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "llama3":
        return plain
    return plain | {
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position,
    }


def attention_name(kind: str) -> str:
    if kind == "torch_varlen":
        AttentionInterface.register("paged|torch_varlen", torch_varlen)
    return f"paged|{kind}"


def torch_varlen(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    cache: Any,
    read_index: list[torch.Tensor],
    write_index: list[torch.Tensor],
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Takes [1, heads, tokens, head_dim], returns [tokens, heads, head_dim]; causal from each sequence's end."""
    keys, values = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=read_index,
        write_index=write_index,
    )
    attended = torch.ops.aten._flash_attention_forward(
        query.transpose(1, 2).squeeze(0).contiguous(),
        keys.contiguous(),
        values.contiguous(),
        cu_seq_lens_q,
        cu_seq_lens_k,
        max_seqlen_q,
        max_seqlen_k,
        0.0,
        True,
        False,
        scale=scaling,
    )
    return attended[0], None


def measure(model: Peer, job: dict[str, Any]) -> dict[str, Any]:
    generation = GenerationConfig(do_sample=False, eos_token_id=NO_TOKEN, pad_token_id=0, max_new_tokens=1024)
    batching = ContinuousBatchingConfig(
        use_cuda_graph=job["has_graphs"],
        use_async_batching=job["is_async"],
        allow_block_sharing=False,
        **tiny_sizes(model),
    )
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, timeout=10
    ) as manager:
        generate(manager, job["prompts"], [2] * len(job["prompts"]), job["limit_s"])
        found = generate(manager, job["prompts"], job["num_outputs"], job["limit_s"])
        settings = manager.continuous_batching_config
    return found | {
        "attention": job["attention"],
        "settings": {
            name: getattr(settings, name)
            for name in (
                "use_cuda_graph",
                "use_async_batching",
                "block_size",
                "num_blocks",
                "max_batch_tokens",
                "max_requests_per_batch",
            )
        },
    }


def tiny_sizes(model: Peer) -> dict[str, Any]:
    """On a CPU there is no GPU memory from which the sizes could be derived."""
    if model.device.type == "cuda":
        return {}
    return {"num_blocks": 64, "block_size": 16, "max_batch_tokens": 64}


def generate(
    manager: Any, prompts: list[list[int]], num_outputs: list[int], limit_s: float
) -> dict[str, Any]:
    """Sends all requests at once and gives up after `limit_s`."""
    begin = time.perf_counter()
    names = [
        manager.add_request(prompt, max_new_tokens=count, eos_token_id=NO_TOKEN)
        for prompt, count in zip(prompts, num_outputs, strict=True)
    ]
    done: dict[str, list[int]] = {}
    while len(done) < len(names) and time.perf_counter() - begin < limit_s:
        result = manager.get_result(timeout=0.5)
        if result is None and not manager.is_running():
            raise RuntimeError("its thread has ended")
        if result is None or not result.is_finished():
            continue
        if result.error:
            raise RuntimeError(result.error)
        done[result.request_id] = list(result.generated_tokens)
    seconds = time.perf_counter() - begin
    is_finished = len(done) == len(names)
    if is_finished and [len(done[name]) for name in names] != num_outputs:
        raise RuntimeError(f"{sum(map(len, done.values()))} tokens instead of {sum(num_outputs)}")
    return {
        "seconds": seconds,
        "is_finished": is_finished,
        "num_done": sum(map(len, done.values())),
        "first_tokens": done.get(names[0], [])[:8],
    }


if __name__ == "__main__":
    main()
