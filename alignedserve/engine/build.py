"""Builds an Engine from an EngineConfig: chooses device and backend, loads the model, sizes the cache, compiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from alignedserve.engine.adapter_places import AdapterPlaces
from alignedserve.engine.checkpoints import Checkpoints
from alignedserve.engine.choices import (
    DEFAULT_CPU_KV_BYTES,
    block_format,
    check_model,
    check_num_gpus,
    choose_backend,
    choose_dtype,
    choose_layer_groups,
    choose_max_model_len,
    choose_num_blocks,
    span_of_requests,
    vocabulary_of,
)
from alignedserve.engine.config import EngineConfig
from alignedserve.engine.engine import Engine, ModelTraits
from alignedserve.engine.gpu_memory import kv_bytes
from alignedserve.engine.kv_cache import Allocate, KVCache, new_blocks
from alignedserve.engine.limits import EngineLimits
from alignedserve.engine.rank_leader import RankLeader
from alignedserve.engine.runner import ModelRunner
from alignedserve.engine.sampler import Sampler
from alignedserve.kernels.cpu.build import BuildFailed, NoCompiler
from alignedserve.kernels.cpu.library import library
from alignedserve.kernels.cpu.ranks import padded
from alignedserve.kv.end_copies import num_parts
from alignedserve.kv.format import BlockFormat, num_restored_blocks
from alignedserve.kv.groups import LayerGroups
from alignedserve.models.base import Model
from alignedserve.models.config import ModelConfig
from alignedserve.models.lora import AdaptedSource, with_adapters
from alignedserve.models.registry import build_model
from alignedserve.models.source import ModelSource, resolve_model
from alignedserve.ops import CudaOptions, make_ops
from alignedserve.ops.base import Ops
from alignedserve.ops.quantise import FP8
from alignedserve.ops.ranks import RankGroup
from alignedserve.ops.step import StepInputs
from alignedserve.text.grammar import Grammars
from alignedserve.text.tokenizer import Tokenizer

# Older GPUs have no conversions from and to e4m3.
MIN_FP8_CAPABILITY = (8, 9)
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class BuiltEngine:
    engine: Engine
    model_config: ModelConfig
    source: ModelSource


def build_engine(
    config: EngineConfig,
    allocate: Allocate = torch.empty,
    has_reversed: bool = False,
    has_whole_prompts: bool = False,
) -> BuiltEngine:
    """Builds the engine. Raises ValueError for a configuration that this model or machine can't run.

    - `allocate`: makes the blocks of the KV cache; it takes the arguments of torch.empty.
    - `has_reversed`: requests may fill their blocks from the last slot down.
    - `has_whole_prompts`: the cache must hold all blocks of the longest request, passed ones included.
    """
    try:
        return _build(config, allocate, has_reversed, has_whole_prompts)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"{config.model} does not fit the GPU's memory with "
            f"gpu_memory_utilization={config.gpu_memory_utilization}, "
            f"max_num_batched_tokens={config.max_num_batched_tokens} and max_num_seqs={config.max_num_seqs}: "
            f"a smaller one of these may help. {str(error).splitlines()[0]}"
        ) from error


@dataclass(frozen=True)
class LoadedModel:
    """A model on its backend, or one rank's part of it."""

    source: ModelSource
    model: Model
    ops: Ops
    form: BlockFormat
    groups: LayerGroups
    max_model_len: int
    has_reversed: bool
    # None: there are no adapters, and none can be loaded.
    adapters: AdapterPlaces | None = None


def load_model(config: EngineConfig, has_reversed: bool, ranks: RankGroup | None = None) -> LoadedModel:
    source = resolve_model(config.model, config.load_format, config.revision)
    model_config = source.config
    device = _device(config.device)
    dtype_name = choose_dtype(config, model_config, is_cpu=device.type == "cpu")
    dtype = TORCH_DTYPES[dtype_name]
    max_model_len = choose_max_model_len(config, model_config)
    options = _cuda_options(config)
    backend = choose_backend(config, model_config)
    ops = make_ops(backend, device, dtype, model_config.head_dim, options, config.quantization, ranks)
    weights = source.open_weights(dtype, device, config.seed, config.use_tqdm)
    # The operations copy the adapters' tensors, on any device.
    weights = with_adapters(weights, config.adapters, config.max_lora_rank, config.num_adapter_places)
    model = build_model(model_config, weights, ops, max_model_len)
    weights.finish()
    names = [module.name for module in config.adapters]
    adapters = AdapterPlaces(weights.adapters, ops, names) if isinstance(weights, AdaptedSource) else None
    # Blocks that are filled from both ends hold all layers.
    form = block_format(config, model_config, dtype_name, share_blocks=has_reversed)
    groups = choose_layer_groups(config, model_config, share_blocks=has_reversed)
    return LoadedModel(source, model, ops, form, groups, max_model_len, has_reversed, adapters)


def new_step(config: EngineConfig, loaded: LoadedModel) -> tuple[StepInputs, int]:
    """Returns the inputs of steps, and the maximum number of requests in one step."""
    max_tokens = config.max_num_batched_tokens
    max_seqs = min(config.max_num_seqs, max_tokens)
    max_columns = loaded.form.num_columns(loaded.max_model_len)
    step = StepInputs(
        max_tokens,
        max_seqs,
        max_columns,
        loaded.ops.device,
        has_adapters=loaded.adapters is not None,
        num_groups=loaded.groups.num_groups,
    )
    step.has_reversed = loaded.has_reversed
    return step, max_seqs


def _build(
    config: EngineConfig, allocate: Allocate, has_reversed: bool, has_whole_prompts: bool
) -> BuiltEngine:
    source = resolve_model(config.model, config.load_format, config.revision)
    _check(config, source, _device(config.device))
    grammars = _grammars(config, source)

    def assemble(loaded: LoadedModel, leader: RankLeader | None = None) -> BuiltEngine:
        engine = _assemble(config, loaded, grammars, allocate, has_whole_prompts, leader)
        return BuiltEngine(engine, source.config, source)

    if config.tensor_parallel_size == 1:
        return assemble(load_model(config, has_reversed))
    is_on_gpu = _device(config.device).type == "cuda"
    num_exchanged = 0 if is_on_gpu else _num_exchanged(config, source.config)
    leader = RankLeader(config, num_exchanged, has_reversed, is_on_gpu)
    try:
        loaded = load_model(config, has_reversed, leader.ranks)
        leader.until_loaded()
        return assemble(loaded, leader)
    except BaseException:
        # Stops the other ranks now: a caller that keeps the error would keep them alive.
        leader.close()
        raise


def _check(config: EngineConfig, source: ModelSource, device: torch.device) -> None:
    model_config, is_cpu = source.config, device.type == "cpu"
    _check_fp8(config, model_config, device)
    check_model(config, model_config)
    if not is_cpu:
        check_num_gpus(config, torch.cuda.device_count())
        check_decode_kernel(config)


def check_decode_kernel(config: EngineConfig) -> None:
    if config.decode_kernel != "shared":
        return
    try:
        library()
    except (NoCompiler, BuildFailed) as error:
        raise ValueError(
            f"decode_kernel='shared': native code of the CPU kernels makes its plans: {error}"
        ) from None


def _num_exchanged(config: EngineConfig, model_config: ModelConfig) -> int:
    """The most values that ranks exchange at once: hidden states of all tokens, or one rank's part of the logits."""
    max_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    logits = max_seqs * padded(-(-model_config.vocab_size // config.tensor_parallel_size))
    return max(config.max_num_batched_tokens * padded(model_config.hidden_size), logits)


def _assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    grammars: Grammars,
    allocate: Allocate,
    has_whole_prompts: bool,
    leader: RankLeader | None,
) -> Engine:
    model, ops, form, max_model_len = loaded.model, loaded.ops, loaded.form, loaded.max_model_len
    groups, max_columns = loaded.groups, form.num_columns(max_model_len)
    step, max_seqs = new_step(config, loaded)
    max_tokens = step.max_tokens
    budget = config.kv_cache_memory_bytes or _kv_bytes(config, loaded, step, leader)
    span = span_of_requests(config, groups, has_whole_prompts)
    num_blocks = choose_num_blocks(config, form, max_model_len, budget, span)
    own_blocks = new_blocks(form, num_blocks, ops.device, allocate)
    num_restored = 0
    if config.hidden_cache:
        num_restored = num_restored_blocks(num_blocks, max_columns)
        shape = (num_restored, 1, *form.shape[1:])
        step.keep_inputs(torch.empty(shape, dtype=ops.dtype, device=ops.device))
    ops.bind_cache(own_blocks, groups)
    if leader:
        leader.prepare(num_blocks)
    compiled = ops.compile(
        model.forward, model.logits, step, max_rows=max_seqs, final_states=model.final_states
    )
    cache = KVCache(form, [own_blocks])
    if leader:
        others = [part.view(own_blocks.dtype).view(own_blocks.shape) for part in leader.until_ready()]
        cache = KVCache(form, [own_blocks, *others])
        compiled = leader.lead(compiled, step, ops.break_up)
    limits = EngineLimits(
        max_num_seqs=max_seqs,
        max_num_batched_tokens=max_tokens,
        max_prefill_chunk=min(config.max_prefill_chunk or max_tokens, max_tokens),
        block_size=form.block_size,
        num_blocks=num_blocks,
        max_restored_blocks=num_restored,
    )
    return Engine(
        runner=ModelRunner(compiled, Sampler(ops), step, max_rows=max_seqs),
        limits=limits,
        cache=cache,
        model=_traits(loaded),
        grammars=grammars,
        checkpoints=Checkpoints(cache.parts, num_parts(num_blocks)) if loaded.has_reversed else None,
    )


def _traits(loaded: LoadedModel) -> ModelTraits:
    vocabulary, window = vocabulary_of(loaded.model.config), loaded.source.config.window
    return ModelTraits(vocabulary, loaded.max_model_len, window, loaded.groups, loaded.adapters)


def _grammars(config: EngineConfig, source: ModelSource) -> Grammars:
    vocabulary = vocabulary_of(source.config)
    directory = None if config.skip_tokenizer_init else config.tokenizer or source.directory

    def tokenizer() -> Tokenizer | None:
        return None if directory is None else Tokenizer.from_directory(directory)

    return Grammars(tokenizer, vocabulary.size, vocabulary.eos_token_ids)


def _cuda_options(config: EngineConfig) -> CudaOptions:
    sizes = config.cudagraph_capture_sizes or (1, 2, 4, *range(8, config.max_num_seqs + 1, 8))
    return CudaOptions(config.decode_kernel, () if config.enforce_eager else tuple(sizes), config.use_tqdm)


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


def _check_fp8(config: EngineConfig, model_config: ModelConfig, device: torch.device) -> None:
    """Raises ValueError if this device can't compute with a part of the model that is FP8."""
    if device.type != "cuda" or config.attention_backend == "torch":
        return
    is_quantised = model_config.quantised is not None and model_config.quantised.kind == FP8
    is_fp8 = {
        "kv_cache_dtype='fp8'": config.kv_cache_dtype == FP8,
        "quantization='fp8'": config.quantization == FP8,
        f"{config.model}, with FP8 weights": is_quantised,
    }
    what = next((each for each in is_fp8 if is_fp8[each]), None)
    if what and (capability := torch.cuda.get_device_capability(device)) < MIN_FP8_CAPABILITY:
        raise ValueError(
            f"{what}: needs a GPU of compute capability 8.9 or newer, this one has {capability}; int8 runs there"
        )


def _kv_bytes(config: EngineConfig, loaded: LoadedModel, step: StepInputs, leader: RankLeader | None) -> int:
    """Bytes that KV may take, of all ranks together."""
    if loaded.ops.device.type != "cuda":
        return DEFAULT_CPU_KV_BYTES

    def measure() -> int:
        return kv_bytes(
            loaded.model, loaded.ops, loaded.form, loaded.groups, step, config.gpu_memory_utilization
        )

    return measure() if leader is None else config.tensor_parallel_size * leader.least(measure)
