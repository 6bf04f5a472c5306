"""Choices that follow from a configuration and a model's config alone, before anything is loaded.

The launcher, the pool and the gateway make them, too, and must agree with the instances. Nothing here needs torch.
"""

from __future__ import annotations

import logging

from alignedserve.engine.config import EngineConfig
from alignedserve.engine.request import Vocabulary
from alignedserve.kv.format import BLOCKS_PER_RESTORED, DTYPE_BYTES, KV_CACHE_DTYPES, BlockFormat
from alignedserve.kv.groups import LayerGroups, layer_groups, one_group
from alignedserve.kv.span import KvSpan
from alignedserve.models.config import ModelConfig

logger = logging.getLogger(__name__)

DEFAULT_CPU_KV_BYTES = 4 * 2**30
# The longest sequences of known models, 10 million tokens, need 6 GiB.
MAX_TABLE_BYTES = 8 * 2**30

# vLLM's aliases.
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def choose_dtype(config: EngineConfig, model_config: ModelConfig, is_cpu: bool) -> str:
    if config.dtype != "auto":
        return _DTYPE_ALIASES.get(config.dtype, config.dtype)
    if model_config.dtype == "float16" and is_cpu:
        logger.warning(
            "The checkpoint is float16, which CPUs are slow at: running in bfloat16. --dtype overrides"
        )
        return "bfloat16"
    return model_config.dtype


def choose_max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    limit = model_config.max_position
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len={config.max_model_len}: the model was made for at most {limit} tokens"
        )
    found = config.max_model_len or limit
    _check_tables(found, config, model_config)
    return found


def _check_tables(max_model_len: int, config: EngineConfig, model_config: ModelConfig) -> None:
    """Raises ValueError for a length with tables that fit no machine, before anything allocates them."""
    num_blocks = -(-max_model_len // config.block_size) * config.max_num_seqs
    # Cosines and sines in float32, and the block numbers of each request.
    num_bytes = 4 * (max_model_len * model_config.head_dim + num_blocks)
    if num_bytes > MAX_TABLE_BYTES:
        raise ValueError(
            f"max_model_len={max_model_len}: the tables for sequences of this length take "
            f"{num_bytes / 2**30:.0f} GiB, more than {MAX_TABLE_BYTES >> 30}; give a smaller --max-model-len"
        )


def choose_backend(config: EngineConfig, model_config: ModelConfig) -> str:
    """Returns the name of the attention backend; auto: the fastest one."""
    is_chosen = config.attention_backend == "auto" and model_config.has_state
    return "torch" if is_chosen else config.attention_backend


def vocabulary_of(model_config: ModelConfig) -> Vocabulary:
    # Some configs list end tokens beyond the vocabulary. The model never samples these.
    eos_token_ids = frozenset(
        token for token in model_config.eos_token_ids if token < model_config.vocab_size
    )
    return Vocabulary(model_config.vocab_size, eos_token_ids)


def block_format(
    config: EngineConfig, model_config: ModelConfig, dtype: str, share_blocks: bool = False
) -> BlockFormat:
    groups = choose_layer_groups(config, model_config, share_blocks)
    form = BlockFormat(
        groups.num_layers,
        config.block_size,
        max(model_config.num_kv_heads // config.tensor_parallel_size, 1),
        model_config.head_dim,
        dtype,
        KV_CACHE_DTYPES[config.kv_cache_dtype],
        num_ranks=config.tensor_parallel_size,
        num_groups=groups.num_groups,
        has_state=groups.has_state,
    )
    if form.layer_bytes < (needed := max(model_config.state_bytes, default=0)):
        raise ValueError(
            f"block_size={config.block_size}: a layer of a block has {form.layer_bytes} bytes, and a state of this "
            f"model needs {needed}: must be at least {-(-needed * config.block_size // form.layer_bytes)}"
        )
    return form


def span_of_requests(config: EngineConfig, groups: LayerGroups, has_whole_prompts: bool) -> KvSpan:
    """The blocks that an instance's requests hold. `has_whole_prompts`: no block of a prompt is freed while it is
    computed."""
    if has_whole_prompts:
        return KvSpan.of_whole_requests(groups, config.block_size)
    return KvSpan.of(groups, config.block_size, config.max_num_batched_tokens)


def choose_layer_groups(config: EngineConfig, model_config: ModelConfig, share_blocks: bool) -> LayerGroups:
    """The layer groups of an instance. An instance that holds blocks for all tokens has all layers in one group."""
    found = layer_groups(model_config.windows, model_config.num_layers, model_config.has_state)
    if found.has_state and (config.hidden_cache or share_blocks):
        setting = "hidden_cache" if config.hidden_cache else "share_blocks"
        raise ValueError(f"{setting}: this model has layers with a state, which have no K and V")
    is_short = not found.has_state and found.window >= choose_max_model_len(config, model_config)
    return one_group(model_config.num_layers) if config.hidden_cache or share_blocks or is_short else found


def check_num_gpus(config: EngineConfig, num_gpus: int) -> None:
    """Raises ValueError unless each rank can have a GPU of its own, among those that this process can use."""
    size = config.tensor_parallel_size
    if size == 1:
        return
    if config.device not in ("auto", "cuda"):
        raise ValueError(f"device={config.device!r}: tensor_parallel_size={size} needs {size} GPUs, not one")
    if num_gpus < size:
        raise ValueError(
            f"tensor_parallel_size={size}: needs a GPU for each rank, and {num_gpus} can be used"
        )


def check_ranks(config: EngineConfig, model_config: ModelConfig) -> None:
    """Raises ValueError unless the model can be divided among `tensor_parallel_size` ranks."""
    size = config.tensor_parallel_size
    if size == 1:
        return
    setting = f"tensor_parallel_size={size}"
    if config.hidden_cache:
        raise ValueError(f"{setting}: hidden_cache needs instances of one rank")
    if model_config.has_state:
        raise ValueError(f"{setting}: this model has layers with a state, which run on one rank")
    kv_heads = model_config.num_kv_heads
    if kv_heads % size and size % kv_heads:
        raise ValueError(f"{setting}: the model's {kv_heads} KV heads can't be divided among {size} ranks")
    has_dense = model_config.moe is None or not all(model_config.moe.layers)
    counts = {
        "attention heads": model_config.num_heads,
        "inner values of an MLP": model_config.intermediate_size if has_dense else size,
        "inner values of an expert": model_config.moe.intermediate_size if model_config.moe else size,
    }
    for name, count in counts.items():
        if count % size:
            raise ValueError(f"{setting}: the model's {count} {name} can't be divided among {size} ranks")


def check_model(config: EngineConfig, model_config: ModelConfig) -> None:
    """Raises ValueError for a configuration that this model can't run, on any machine."""
    _check_hidden_cache(config, model_config)
    _check_quantization(config, model_config)
    _check_states(config, model_config)
    check_ranks(config, model_config)


def _check_hidden_cache(config: EngineConfig, model_config: ModelConfig) -> None:
    """A layer's input must be as wide as its K, so that it takes half the memory of K and V."""
    width = model_config.num_kv_heads * model_config.head_dim
    if config.hidden_cache and width != model_config.hidden_size:
        raise ValueError(
            f"hidden_cache: this model's K is {width} values wide and a layer's input {model_config.hidden_size}; "
            "both must have the same width, as in OPT"
        )


def _check_states(config: EngineConfig, model_config: ModelConfig) -> None:
    if not model_config.has_state:
        return
    sizes, num_layers = model_config.state_bytes, model_config.num_layers
    if len(sizes) != num_layers or any(each % DTYPE_BYTES["float32"] for each in sizes):
        raise ValueError(
            f"state_bytes={sizes}: must be those of float32 values in each of {num_layers} layers"
        )
    if config.attention_backend not in ("auto", "torch"):
        raise ValueError(
            f"attention_backend={config.attention_backend!r}: must be torch for a model that has layers with a state"
        )


def _check_quantization(config: EngineConfig, model_config: ModelConfig) -> None:
    """A model that is quantised already can be neither quantised nor have random weights."""
    if model_config.quantised is None:
        return
    where = f"{config.model} is quantized ({model_config.quantised.method})"
    if config.quantization is not None:
        raise ValueError(f"quantization={config.quantization!r}: {where} already")
    if config.load_format == "dummy":
        raise ValueError("load_format='dummy': " + where + ", and random weights are not")


def _num_affordable(config: EngineConfig, form: BlockFormat, needed: int, budget: int) -> int:
    """The number of blocks within `budget`. With a hidden cache, `num_restored_blocks` of one layer must fit beside
    them."""
    if not config.hidden_cache:
        return budget // form.block_bytes
    beside_longest = (budget - needed * form.layer_bytes) // form.block_bytes
    beside_share = BLOCKS_PER_RESTORED * budget // (BLOCKS_PER_RESTORED * form.block_bytes + form.layer_bytes)
    return max(min(beside_longest, beside_share), 0)


def choose_num_blocks(
    config: EngineConfig, form: BlockFormat, max_model_len: int, budget: int, span: KvSpan
) -> int:
    """The number of blocks of an instance's KV cache, for a `budget` in bytes. `span`: the blocks that its requests
    hold."""
    needed = span.num_held(0, max_model_len)
    affordable = _num_affordable(config, form, needed, max(budget, 0))
    least_bytes = needed * (form.block_bytes + (form.layer_bytes if config.hidden_cache else 0))
    if affordable < needed:
        raise ValueError(
            f"kv_cache_memory_bytes={budget}: {affordable} blocks of {form.block_bytes} bytes, but one request of "
            f"max_model_len={max_model_len} tokens needs {needed}. Allow at least {least_bytes} bytes "
            f"(on a GPU, a higher gpu_memory_utilization helps too), or set max_model_len to at most "
            f"{min(span.longest(affordable) * form.block_size, max_model_len)}"
        )
    # Blocks beyond full-length requests in all slots would be reserved, but never used.
    return min(affordable, form.num_groups * form.num_columns(max_model_len) * config.max_num_seqs)
