"""The configuration of an engine. It is frozen. Values measured at start-up, such as the number of blocks, are stored
with their owner. The text beside a field is its help on the command line, in a group (`options_of` in cli/options.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from alignedserve.engine.lora_modules import LoraModule, parse_lora_modules
from alignedserve.kv.format import KV_CACHE_DTYPES

# vLLM has "float" and "half", too.
DTYPES = ("auto", "float32", "bfloat16", "float16", "float", "half")
ATTENTION_BACKENDS = ("auto", "cpu", "torch", "triton")
DECODE_KERNELS = ("balanced", "plain", "shared")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
QUANTIZATIONS = ("int8", "int4", "fp8")
# Their names and places must fit into one message.
MOST_LORAS = 64


@dataclass(frozen=True)
class EngineConfig:
    model: Annotated[str, "directory, GGUF file, hub name, or a preset with --load-format dummy"]
    tokenizer: Annotated[str | None, "directory of the tokenizer [default: the model's]", "model"] = None
    skip_tokenizer_init: Annotated[bool, "load no tokenizer; requests and answers are token ids"] = False
    allow_special_tokens_in_messages: Annotated[
        bool, "parse the text of special tokens in chat messages as these tokens"
    ] = False
    revision: Annotated[str | None, "branch, tag or commit on the hub [default: main]"] = None
    dtype: Annotated[str, "dtype of weights and KV; auto is the checkpoint's", DTYPES] = "auto"
    quantization: Annotated[
        str | None, "quantize linear layers when weights are loaded [default: no]", QUANTIZATIONS
    ] = None
    tensor_parallel_size: Annotated[
        int, "processes, and GPUs, that each instance's model is divided over"
    ] = 1
    kv_cache_dtype: Annotated[
        str,
        "dtype of KV in instances; auto is the model's, fp8 is e4m3, int8 scales each token and head",
        tuple(KV_CACHE_DTYPES),
        "memory",
    ] = "auto"
    enable_lora: Annotated[bool, "accepted for vLLM's commands; --lora-modules is enough", "model"] = False
    lora_modules: Annotated[
        tuple[str, ...],
        "LoRA adapters to serve as models: name=path, or JSON with name and path; several may follow",
    ] = ()
    max_lora_rank: Annotated[int, "maximum rank of an adapter"] = 16
    max_loras: Annotated[
        int,
        "adapters for which each instance reserves memory, so that they can be loaded while it runs "
        "[default: none beside --lora-modules]",
    ] = 0
    device: Annotated[str, "cpu, cuda, or auto: a GPU if there is one; without a server also cuda:1, …"] = (
        "auto"
    )
    attention_backend: Annotated[
        str,
        "kernels to use; auto is triton on GPUs and cpu, which is native code, on CPUs",
        ATTENTION_BACKENDS,
        "expert",
    ] = "auto"
    decode_kernel: Annotated[
        str,
        "decode kernel of triton; plain runs one program per sequence and KV head; shared reads common prefixes once",
        DECODE_KERNELS,
    ] = "balanced"
    enforce_eager: Annotated[bool, "launch kernels one by one, without CUDA graphs"] = False
    cudagraph_capture_sizes: Annotated[
        tuple[int, ...],
        "batch size to capture as a CUDA graph; repeat for more [default: 1, 2, 4, then multiples of 8]",
    ] = ()
    gpu_memory_utilization: Annotated[
        float, "share of a GPU's memory for weights, activations and KV", "memory"
    ] = 0.92
    load_format: Annotated[str, "format of the weights; dummy makes random ones", LOAD_FORMATS, "model"] = (
        "auto"
    )
    max_model_len: Annotated[
        int | None, "maximum tokens of a request, prompt and output [default: the model's]"
    ] = None
    max_num_seqs: Annotated[int, "maximum requests that an instance runs at once", "limits"] = 256
    max_num_batched_tokens: Annotated[int, "maximum tokens of an iteration, prompts and outputs"] = 2048
    max_prefill_chunk: Annotated[
        int | None, "maximum tokens of one prompt in an iteration [default: no limit]"
    ] = None
    block_size: Annotated[int, "tokens per KV block", "memory"] = 16
    enable_prefix_caching: Annotated[bool, "reuse the KV of equal prompt prefixes"] = True
    hidden_cache: Annotated[
        bool, "let policies keep the inputs of layers instead of KV, in half the memory"
    ] = False
    kv_cache_memory_bytes: Annotated[
        int | None, "memory of each instance for KV [default: 4 GiB, or most of a GPU's free memory]"
    ] = None
    seed: Annotated[int, "seed of requests that have none", "model"] = 0
    use_tqdm: Annotated[bool, "show progress bars", "operation"] = True

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
        if (self.adapters or self.max_loras) and self.hidden_cache:
            raise ValueError(
                "hidden_cache: restores K and V without adapters, but lora_modules has "
                f"{self.adapter_names}, and max_loras is {self.max_loras}"
            )
        if not 0 <= self.max_loras <= MOST_LORAS:
            raise ValueError(f"max_loras={self.max_loras}: must be from 0 to {MOST_LORAS}")
        if self.max_loras and self.tensor_parallel_size > 1:
            raise ValueError(
                f"max_loras={self.max_loras}: an instance of {self.tensor_parallel_size} processes "
                "(tensor_parallel_size) loads adapters only when it starts"
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
    def num_adapter_places(self) -> int:
        """The places for adapters of an instance; 0: those of `lora_modules`, and no others. There is one more than
        may be in use, for one that replaces another which requests still use."""
        return max(self.max_loras, len(self.adapters)) + 1 if self.max_loras else 0

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
