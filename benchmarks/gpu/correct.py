"""Compares greedy tokens of small float32 models on this device with the plain reference on the CPU.

Their random weights are large enough for attention and every layer to matter, and are saved as a checkpoint that both
sides load. Prompts are computed in one go, in chunks, and with so few blocks that requests are preempted, their KV
saved and resumed. All this is done with each decode kernel.

In bfloat16, which FlashAttention and CUDA graphs of prompts need, sums have a different order in every shape. There the
log-probability of the first token is compared with that of kernels launched one by one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from alignedserve.engine.build import build_engine
from alignedserve.engine.config import EngineConfig
from alignedserve.engine.outputs import TokenOutput
from alignedserve.models.hf_config import model_config_from_dict
from alignedserve.models.presets import PRESETS
from alignedserve.models.registry import build_model
from alignedserve.models.source import resolve_model
from alignedserve.models.weights import TakePart
from alignedserve.offline.local_instance import LocalInstance
from alignedserve.ops.torch_ops import TorchOps
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import RequestId
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.decoding import has_decode_kernels, kernel_option
from benchmarks.gpu.models import tiny, write_config
from benchmarks.gpu.record import Row

# With a window in some layers, with experts, with few KV heads, with many, with norms of q and k.
FAMILIES = ("gemma-3-4b", "qwen3-30b-a3b", "llama-3.1-8b", "opt-13b", "qwen3-0.6b")
PROMPT_LENGTHS = (1, 2, 7, 16, 17, 33, 64, 150, 300)
MAX_LEN, NUM_NEW, BLOCK_SIZE = 512, 48, 16
# Fewer blocks than all prompts above and their outputs need, but enough for any one of them.
FEW_BLOCKS = 36
WAYS: dict[str, dict[str, Any]] = {
    "in one go": {},
    "in chunks": {"max_num_batched_tokens": 64, "max_prefill_chunk": 24},
    "preempted": {"few_blocks": True},
}
# For log-probabilities in bfloat16.
TOLERANCE = 0.05
Tokens = list[list[int]]


def first_difference(ours: Tokens, expected: Tokens) -> str | None:
    for index, (got, wanted) in enumerate(zip(ours, expected, strict=True)):
        for position, (a, b) in enumerate(zip(got, wanted, strict=False)):
            if a != b:
                return f"prompt {index}, token {position}: {a} instead of {b}"
        if len(got) != len(wanted):
            return f"prompt {index}: {len(got)} tokens instead of {len(wanted)}"
    return None


def run(bench: Bench) -> None:
    for name in bench.models(*FAMILIES):
        try:
            directory = checkpoint(bench.out / "checkpoints" / name, tiny(PRESETS[name]))
            expected = reference(directory)
        except Exception:
            bench.fail(name)
            continue
        for kernel in bench.options.decode_kernels if has_decode_kernels() else ("",):
            for way, options in WAYS.items():
                case = f"{name} {kernel} {way}".replace("  ", " ")
                bench.case(case, compare, bench, directory, expected, kernel, options)
        bench.case(f"{name} bfloat16 captured", compare_captured, bench, directory)


def reference(directory: Path) -> Tokens:
    # With tensors this small, more threads only wait for each other.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return generate(directory, torch.device("cpu"), "torch", {})[0]
    finally:
        torch.set_num_threads(num_threads)


def compare(bench: Bench, directory: Path, expected: Tokens, kernel: str, options: dict[str, Any]) -> Row:
    chosen = options | (kernel_option(kernel) if kernel else {})
    tokens, num_evictions = generate(directory, bench.device, bench.options.backend, chosen)
    if "few_blocks" in options and not num_evictions:
        raise RuntimeError("nothing was preempted")
    difference = first_difference(tokens, expected)
    return {
        "is_equal": difference is None,
        "difference": difference,
        "num_tokens": sum(map(len, expected)),
        "num_evictions": num_evictions,
        "summary": f"{sum(map(len, expected))} tokens equal"
        if difference is None
        else f"DIFFERS: {difference}",
    }


def compare_captured(bench: Bench, directory: Path) -> Row:
    options = {"dtype": "bfloat16", "max_num_batched_tokens": 256, "max_prefill_chunk": 100}
    each = []
    for is_eager in (True, False):
        instance = instance_of(
            directory, bench.device, bench.options.backend, 256, options | {"enforce_eager": is_eager}
        )
        events = run_prompts(instance, SamplingParams(temperature=0, max_tokens=1, logprobs=0))
        each.append([event.logprobs.logprobs[0] for event in events if event.logprobs])
    error = max(abs(one - other) for one, other in zip(*each, strict=True))
    return {
        "max_error": error,
        "is_equal": error <= TOLERANCE,
        "summary": f"{len(each[0])} prompts, first tokens' log-probabilities within {error:.4f}"
        + ("" if error <= TOLERANCE else f": DIFFERS by more than {TOLERANCE}"),
    }


def generate(
    directory: Path, device: torch.device, backend: str, options: dict[str, Any]
) -> tuple[Tokens, int]:
    options = dict(options)
    num_blocks = FEW_BLOCKS if options.pop("few_blocks", False) else 256
    instance = instance_of(directory, device, backend, num_blocks, {"dtype": "float32"} | options)
    tokens: dict[RequestId, list[int]] = {}
    for event in run_prompts(instance, SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)):
        assert event.token_id is not None
        tokens.setdefault(event.request_id, []).append(event.token_id)
    return [tokens[RequestId(str(index))] for index in range(len(tokens))], instance.num_evictions


def instance_of(
    directory: Path, device: torch.device, backend: str, num_blocks: int, options: dict[str, Any]
) -> LocalInstance:
    config = resolve_model(directory).config
    # Enough for float32.
    block_bytes = 4 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * BLOCK_SIZE
    built = build_engine(
        EngineConfig(
            str(directory),
            device=str(device),
            attention_backend=backend,
            skip_tokenizer_init=True,
            max_model_len=MAX_LEN,
            max_num_seqs=16,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=num_blocks * block_bytes,
            use_tqdm=False,
            **options,
        )
    )
    return LocalInstance(built.engine)


def run_prompts(instance: LocalInstance, params: SamplingParams) -> list[TokenOutput]:
    """Returns all events, in the order of the prompts."""
    for index, prompt in enumerate(prompts(instance.engine.vocabulary.size)):
        instance.add_request(RequestId(str(index)), prompt, params, 0)
    events = []
    while instance.num_unfinished:
        for event in instance.step():
            if event.error is not None or event.token_id is None:
                raise RuntimeError(f"{event.request_id}: {event.error}")
            events.append(event)
    instance.check_idle()
    return sorted(events, key=lambda event: int(event.request_id))


def prompts(vocab_size: int) -> Iterator[list[int]]:
    choose = random.Random(0)
    for length in PROMPT_LENGTHS:
        yield [choose.randrange(vocab_size) for _ in range(length)]


def checkpoint(directory: Path, config: dict[str, Any]) -> Path:
    write_config(directory, config)
    weights = RandomWeights()
    build_model(
        model_config_from_dict(config, where=str(directory)), weights, TorchOps(torch.float32), MAX_LEN
    )
    save_file(weights.tensors, directory / "model.safetensors")
    return directory


class RandomWeights:
    """A WeightSource that makes up random tensors when they are requested, and keeps them."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(0)

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        deviation = 0.15 if len(shape) > 1 else 0.2
        tensor = torch.randn(tuple(shape), generator=self._generator) * deviation
        if name.endswith("norm.weight"):
            tensor += 1.0
        self.tensors[name] = tensor
        return tensor

    def linear(self, layer: str, num_out: int, num_in: int) -> torch.Tensor:
        return self.take(f"{layer}.weight", (num_out, num_in))

    def of_experts(self, layer: str, num_experts: int, num_out: int, num_in: int) -> TakePart:
        tensor = self.take(layer, (num_experts, num_in, num_out))
        return lambda number: tensor[number].T

    def finish(self) -> None:
        """There is nothing to close."""
