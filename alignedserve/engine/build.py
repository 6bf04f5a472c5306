"""From an EngineConfig to a running Engine: choose device and backend, load, size the cache, compile."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from alignedserve.config import EngineConfig
from alignedserve.engine.batch import BatchTable
from alignedserve.engine.blocks import BlockManager
from alignedserve.engine.engine import Engine
from alignedserve.engine.kv_cache import KVCache
from alignedserve.engine.ops import make_ops
from alignedserve.engine.ops.base import Ops
from alignedserve.engine.policy import FcfsPolicy, IterationPolicy, Limits
from alignedserve.engine.runner import ModelRunner
from alignedserve.engine.sampler import Sampler
from alignedserve.engine.step import StepInputs
from alignedserve.engine.validate import Vocabulary
from alignedserve.kv_format import BlockFormat
from alignedserve.models.base import Model
from alignedserve.models.config import ModelConfig
from alignedserve.models.registry import build_model
from alignedserve.models.source import ModelSource, resolve_model

logger = logging.getLogger(__name__)

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

DEFAULT_CPU_KV_BYTES = 4 * 2**30
# Share of a GPU's free memory that goes to KV when no size is given.
DEFAULT_GPU_KV_SHARE = 0.85


@dataclass(frozen=True)
class BuiltEngine:
    engine: Engine
    model_config: ModelConfig
    source: ModelSource


def build_engine(config: EngineConfig, policy: type[IterationPolicy] = FcfsPolicy) -> BuiltEngine:
    source = resolve_model(config.model, config.load_format, config.revision)
    model_config = source.config
    device = _device(config.device)
    dtype = _dtype(config.dtype, model_config.dtype, device)
    max_model_len = _max_model_len(config, model_config)
    ops = make_ops(config.attention_backend, device, dtype)
    weights = source.open_weights(dtype, device, config.seed, config.use_tqdm)
    model = build_model(model_config, weights, ops, max_model_len)
    weights.finish()
    form = BlockFormat(
        model_config.num_layers,
        config.block_size,
        model_config.num_kv_heads,
        model_config.head_dim,
        _name(dtype),
    )
    engine = _assemble(config, model, ops, form, max_model_len, policy)
    return BuiltEngine(engine, model_config, source)


def _assemble(
    config: EngineConfig,
    model: Model,
    ops: Ops,
    form: BlockFormat,
    max_model_len: int,
    policy: type[IterationPolicy],
) -> Engine:
    blocks = BlockManager(_num_blocks(config, form, max_model_len, ops.device))
    cache = KVCache(form, blocks.num_blocks, ops.device)
    ops.bind_cache(cache.blocks)
    max_blocks_per_seq = form.num_blocks(max_model_len)
    max_tokens = config.max_num_batched_tokens
    max_seqs = min(config.max_num_seqs, max_tokens)
    step = StepInputs(max_tokens, max_seqs, max_blocks_per_seq, ops.device)
    compiled = ops.compile(model.forward, model.logits, step, max_rows=max_seqs)
    limits = Limits(
        max_num_seqs=max_seqs,
        max_num_batched_tokens=max_tokens,
        max_prefill_chunk=min(config.max_prefill_chunk or max_tokens, max_tokens),
        block_size=form.block_size,
    )
    return Engine(
        runner=ModelRunner(compiled, Sampler(ops), step, max_rows=max_seqs),
        policy=policy(limits),
        blocks=blocks,
        cache=cache,
        table=BatchTable(max_seqs, max_blocks_per_seq, form.block_size),
        vocabulary=_vocabulary(model.config),
        max_model_len=max_model_len,
    )


def _vocabulary(config: ModelConfig) -> Vocabulary:
    # configs name end tokens that the model does not have: it never says them
    eos_token_ids = frozenset(token for token in config.eos_token_ids if token < config.vocab_size)
    return Vocabulary(config.vocab_size, eos_token_ids)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r}: {error}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r}: must be auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: this machine has no CUDA device")
    return device


def _dtype(asked: str, of_checkpoint: str, device: torch.device) -> torch.dtype:
    if asked != "auto":
        return _TORCH_DTYPES[asked]
    if of_checkpoint == "float16" and device.type == "cpu":
        logger.warning(
            "The checkpoint is float16, which CPUs are slow at: running in bfloat16. --dtype overrides"
        )
        return torch.bfloat16
    return _TORCH_DTYPES[of_checkpoint]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    limit = model_config.max_position
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len={config.max_model_len}: the model was made for at most {limit} tokens"
        )
    return config.max_model_len or limit


def _num_blocks(config: EngineConfig, form: BlockFormat, max_model_len: int, device: torch.device) -> int:
    budget = config.kv_cache_memory_bytes or _default_kv_bytes(device)
    affordable = budget // form.block_bytes
    needed = form.num_blocks(max_model_len)
    if affordable < needed:
        raise ValueError(
            f"kv_cache_memory_bytes={budget}: {affordable} blocks of {form.block_bytes} bytes, but one request of "
            f"max_model_len={max_model_len} tokens needs {needed}. Allow at least {needed * form.block_bytes} bytes, "
            f"or set max_model_len to at most {affordable * form.block_size}"
        )
    # More than all slots can ever fill would only be reserved, never used.
    return min(affordable, needed * config.max_num_seqs)


def _default_kv_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * DEFAULT_GPU_KV_SHARE)
    return DEFAULT_CPU_KV_BYTES
