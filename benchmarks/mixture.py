"""Compares decode steps of a mixture of experts on a CPU with transformers on the same cores, and with a lower bound.

    python -m benchmarks.mixture [--experts 16 --top-k 2 --hidden 1024 --inner 512 --layers 8] [--batches 1,32]
        [--quantizations none,int8,int4] [--threads N] [--rounds 3] [--steps 8] [--no-transformers]

Both have the same random weights in bfloat16. Each round measures every engine at every batch size, in turn. It prints
each one's shortest step, which other load disturbs least, and the median. The lower bound is the time to read the
necessary weights, including the experts that such a batch is expected to hit, at the rate at which these cores read or
copy memory, whichever is higher. (A small model may be faster, since a cache may hold it.) With --profile it prints the
time of each operation.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from alignedserve.engine.build import BuiltEngine, build_engine
from alignedserve.engine.config import EngineConfig
from alignedserve.kernels.cpu.structs import OpKind
from alignedserve.models.config import ModelConfig
from alignedserve.models.hf_config import load_model_config
from alignedserve.ops.base import BYTES_PER_WEIGHT
from alignedserve.ops.cpu_model import CpuModel
from benchmarks.gpu.decoding import Decoding
from benchmarks.gpu.roofline import expert_values, hit_experts, matrix_values
from benchmarks.harness import in_turn, parser_of, seconds_of

PROMPT_LEN = 64
VOCAB_SIZE = 4096
THEIRS = "transformers"


def save_model(args: Namespace, directory: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=args.hidden,
        moe_intermediate_size=args.inner,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(args.hidden // 256, 1),
        head_dim=64,
    )
    config = Qwen3MoeConfig(**sizes, max_position_embeddings=4096, norm_topk_prob=True, dtype="bfloat16")
    model: Any = Qwen3MoeForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)


def floor_bytes(config: ModelConfig, batch: int, quantization: str | None) -> float:
    """Returns the bytes of all weights that a step reads. The head has eight bits if the others have fewer."""
    head = config.vocab_size * config.hidden_size
    each = BYTES_PER_WEIGHT[quantization] if quantization else 2.0
    layers = matrix_values(config) - head + expert_values(config) * hit_experts(config, batch)
    return layers * each + head * (1.0 if quantization else 2.0)


def bytes_per_second(rounds: int = 10) -> float:
    """Returns the best rate at which torch's threads read uncached memory, or copy it."""
    values = torch.ones(32 << 20, dtype=torch.float64)
    target = torch.empty_like(values)
    reading = min(seconds_of(values.sum) for _ in range(rounds))
    copying = min(seconds_of(target.copy_, values) for _ in range(rounds))
    return max(values.nbytes / reading, 2 * values.nbytes / copying)


def build(directory: Path, quantization: str | None, max_batch: int) -> BuiltEngine:
    return build_engine(
        EngineConfig(
            str(directory),
            device="cpu",
            skip_tokenizer_init=True,
            quantization=quantization,
            max_num_seqs=max_batch,
            max_model_len=1024,
            kv_cache_memory_bytes=1 << 28,
        )
    )


def ours(built: BuiltEngine, batch: int, num_steps: int) -> list[float]:
    """Returns the seconds of each step but the first."""
    with Decoding(built.engine, [PROMPT_LEN] * batch, num_steps + 4) as decoding:
        return [decoding.wall_seconds(1, warm_ups=0)[0] for _ in range(num_steps)][1:]


def theirs(model: Any, batch: int, num_steps: int) -> list[float]:
    """Returns the seconds of each step but the first, after one that computes the prompt."""
    tokens = torch.randint(VOCAB_SIZE, (batch, PROMPT_LEN))
    state: dict[str, Any] = {}

    def step() -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            out = model(state.get("next", tokens), past_key_values=state.get("cache"), use_cache=True)
            state.update(next=out.logits[:, -1:].argmax(-1), cache=out.past_key_values)
        return time.perf_counter() - begin

    return [step() for _ in range(1 + num_steps)][2:]


def profiled(built: BuiltEngine, batch: int, num_steps: int) -> dict[str, float]:
    """Returns the least seconds of each kind of operation in a step."""
    model = built.engine._runner._model
    if not isinstance(model, CpuModel):
        raise TypeError(f"a profile is of the cpu backend, not of {type(model).__name__}")
    found: list[dict[str, float]] = []
    with Decoding(built.engine, [PROMPT_LEN] * batch, 4) as decoding:
        decoding.wall_seconds(1)
        for _ in range(num_steps):
            sums: defaultdict[str, float] = defaultdict(float)
            for op, seconds in model.profile(torch.arange(batch, dtype=torch.int32)):
                sums[OpKind(op.kind).name.lower()] += seconds
            found.append(sums)
    return {name: min(each[name] for each in found) for name in found[0]}


def measure(args: Namespace, directory: Path) -> None:
    config, batches = load_model_config(directory), [int(each) for each in args.batches.split(",")]
    schemes = [None if each == "none" else each for each in args.quantizations.split(",")]
    engines = {scheme: build(directory, scheme, max(batches)) for scheme in schemes}
    model = None if args.no_transformers else _transformers(directory)
    runs: dict[tuple[str, int], Callable[[], list[float]]] = {}
    for batch in batches:
        for scheme, built in engines.items():
            runs[scheme or "bfloat16", batch] = partial(ours, built, batch, args.steps)
        if model is not None:
            runs[THEIRS, batch] = partial(theirs, model, batch, args.steps)
    found = {name: [*chain(*rounds)] for name, rounds in in_turn(runs, args.rounds).items()}
    bytes_per_s = bytes_per_second()
    print(f"{args.threads} threads, {bytes_per_s / 1e9:.1f} GB/s")
    for (name, batch), seconds in sorted(found.items(), key=lambda item: item[0][1]):
        scheme = None if name in (THEIRS, "bfloat16") else name
        floor_s = floor_bytes(config, batch, scheme) / bytes_per_s
        least_s, median_s = min(seconds), statistics.median(seconds)
        ratio = min(found.get((THEIRS, batch), seconds)) / least_s
        print(
            f"batch {batch:3} {name:12} least {least_s * 1e3:8.2f} ms, median {median_s * 1e3:8.2f} ms, floor "
            f"{floor_s * 1e3:7.2f} ms: {floor_s / least_s:6.1%}; {ratio:5.2f} times {THEIRS}"
        )
    for batch in batches if args.profile else ():
        for scheme, built in engines.items():
            times = profiled(built, batch, args.steps)
            text = ", ".join(f"{name} {each * 1e3:.2f}" for name, each in times.items() if each > 2e-5)
            print(f"batch {batch:3} {scheme or 'bfloat16':12} ms: {text}")


def _transformers(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    return model.eval()


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    for name, default in (("experts", 16), ("top-k", 2), ("hidden", 1024), ("inner", 512), ("layers", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--quantizations", default="none,int8,int4")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-transformers", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as directory:
        save_model(args, Path(directory))
        measure(args, Path(directory))


if __name__ == "__main__":
    main()
