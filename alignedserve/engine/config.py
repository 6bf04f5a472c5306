"""The configuration of an engine. It is frozen. Values measured at start-up, such as the number of blocks, are stored
with their owner.

The text beside a field is its help on the command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from alignedserve.engine.lora_modules import LoraModule, parse_lora_modules
from alignedserve.protocol.kv_format import KV_CACHE_DTYPES

# vLLM has "float" and "half", too.
DTYPES = ("auto", "float32", "bfloat16", "float16", "float", "half")
DECODE_KERNELS = ("balanced", "plain")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
QUANTIZATIONS = ("int8", "int4", "fp8")


@dataclass(frozen=True)
class EngineConfig:
    model: Annotated[str, "directory, hub name, or (with load format dummy) a preset"]
    tokenizer: Annotated[str | None, "where the tokenizer is, if not with the model"] = None
    skip_tokenizer_init: Annotated[bool, "accept and return token ids only"] = False
    allow_special_tokens_in_messages: Annotated[
        bool, "a special token's text in a chat's messages becomes that token, as in the template itself"
    ] = False
    revision: Annotated[str | None, "branch, tag or commit on the hub"] = None
    dtype: Annotated[str, f"dtype of weights and KV: {', '.join(DTYPES)}; auto: the checkpoint's"] = "auto"
    quantization: Annotated[
        str | None, "int8, int4 or fp8: quantise linear layers when weights are loaded; on CPUs"
    ] = None
    tensor_parallel_size: Annotated[
        int, "processes that share an instance's model, each with some of its heads; on CPUs"
    ] = 1
    kv_cache_dtype: Annotated[
        str,
        "dtype of KV: auto (the model's), or 8 bits a value: fp8 (e4m3), int8 (a scale per token and head)",
    ] = "auto"
    enable_lora: Annotated[
        bool, "no effect, accepted for vLLM's commands: --lora-modules enables adapters"
    ] = False
    lora_modules: Annotated[
        tuple[str, ...],
        "adapters (LoRA), served as models: name=path, or JSON with name and path; several may follow",
    ] = ()
    max_lora_rank: Annotated[int, "the highest rank of an adapter"] = 16
    device: Annotated[str, "cpu, cuda (offline also cuda:1, ...), or auto: CUDA if there is a GPU"] = "auto"
    attention_backend: Annotated[
        str, "auto, torch (the plain reference), cpu (native code) or triton (CUDA)"
    ] = "auto"
    decode_kernel: Annotated[
        str, "for backend triton: balanced, or plain (one program per sequence and KV head)"
    ] = "balanced"
    enforce_eager: Annotated[bool, "no CUDA graphs: kernels are launched one by one"] = False
    cudagraph_capture_sizes: Annotated[
        tuple[int, ...], "batches of decodes to capture [default: 1, 2, 4, then multiples of 8]"
    ] = ()
    gpu_memory_utilization: Annotated[
        float, "share of a GPU's memory that this process may use, for weights, KV and work space"
    ] = 0.92
    load_format: Annotated[str, "dummy makes random weights of the right shapes"] = "auto"
    max_model_len: Annotated[int | None, "prompt and output tokens of a request [default: the model's]"] = (
        None
    )
    max_num_seqs: Annotated[int, "requests that run at once"] = 256
    max_num_batched_tokens: Annotated[int, "tokens of one iteration, prompts and outputs together"] = 2048
    max_prefill_chunk: Annotated[int | None, "tokens of one prompt in one iteration [default: no limit]"] = (
        None
    )
    block_size: Annotated[int, "tokens per KV block"] = 16
    enable_prefix_caching: Annotated[bool, "prompts that share a prefix with earlier ones reuse its KV"] = (
        True
    )
    hidden_cache: Annotated[bool, "the inputs of layers may be kept in place of KV, in half the memory"] = (
        False
    )
    kv_cache_memory_bytes: Annotated[
        int | None, "memory for KV, in bytes [default: 4 GiB, or most of a GPU's free memory]"
    ] = None
    seed: Annotated[int, "requests without a seed get one derived from this one"] = 0
    use_tqdm: Annotated[bool, "progress bars"] = True

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        if self.quantization is not None:
            _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, tuple(KV_CACHE_DTYPES))
        if self.hidden_cache and self.kv_cache_dtype != "auto":
            raise ValueError(
                f"hidden_cache=True and kv_cache_dtype={self.kv_cache_dtype!r}: must be auto then, since inputs are "
                "kept in the model's dtype"
            )
        _one_of("decode_kernel", self.decode_kernel, DECODE_KERNELS)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization={self.gpu_memory_utilization}: must be above 0, at most 1"
            )
        if self.adapters and self.hidden_cache:
            raise ValueError(
                f"hidden_cache: restores K and V without adapters, but lora_modules has {self.adapter_names}"
            )
        for name in (
            *("max_num_seqs", "max_num_batched_tokens", "block_size", "tensor_parallel_size"),
            "max_lora_rank",
        ):
            _at_least_one(name, getattr(self, name))
        for name in ("max_model_len", "max_prefill_chunk", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))

    @property
    def adapters(self) -> tuple[LoraModule, ...]:
        """The parsed `lora_modules`. Raises ValueError if they are malformed."""
        return parse_lora_modules(self.lora_modules)

    @property
    def adapter_names(self) -> str:
        """All adapter names as one text, to print and to compare."""
        return ", ".join(module.name for module in self.adapters) or "none"


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}")


def _at_least_one(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: must be an integer, at least 1")
