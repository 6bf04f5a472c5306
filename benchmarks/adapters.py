"""Measures the cost of LoRA adapters on a CPU: without any, with adapters loaded but unused, and with adapters used.

The kinds of iterations are timed in turn over several rounds, so that other load on the machine slows all of them.
Weights and adapters are random. It prints milliseconds per iteration, the best of all rounds, and ratios.

    python -m benchmarks.adapters [--model qwen3-0.6b] [--num-layers 8] [--rank 16] [--rounds 8]
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from alignedserve.engine.build import build_engine
from alignedserve.engine.config import EngineConfig
from alignedserve.engine.engine import Engine
from alignedserve.engine.request import NewRequest
from alignedserve.instance.direct import DirectEngine
from alignedserve.models import presets
from alignedserve.models.config import ModelConfig
from alignedserve.models.listed_weights import ListedSource, ListingOps
from alignedserve.models.registry import build_model
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import RequestId
from benchmarks.harness import in_turn, parser_of, seconds_of

NAMES = ("one", "two", "three", "four")
# (name, requests, tokens per request): decodes, and a prompt.
BATCHES = (("1 decode", 1, 1), ("8 decodes", 8, 1), ("64 decodes", 64, 1), ("a prompt of 512", 1, 512))
CONTEXT = 64
PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=10_000)


class Recorder(ListedSource):
    """Records the shapes of linear layers."""

    def __init__(self) -> None:
        super().__init__(torch.float32, None)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("_proj.weight"):
            self.shapes[name.removesuffix(".weight")] = shape
        return super().take(name, shape)


def write_adapters(directory: Path, model: ModelConfig, rank: int) -> tuple[str, ...]:
    recorder = Recorder()
    build_model(model, recorder, ListingOps(torch.float32, None), max_model_len=1)
    for name in NAMES:
        tensors = {}
        for layer, (num_out, num_in) in recorder.shapes.items():
            key = f"base_model.model.{layer}.lora_"
            tensors[f"{key}A.weight"] = torch.randn(rank, num_in) * 0.01
            tensors[f"{key}B.weight"] = torch.randn(num_out, rank) * 0.01
        (directory / name).mkdir()
        save_file(tensors, directory / name / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
        (directory / name / "adapter_config.json").write_text(json.dumps(config))
    return tuple(f"{name}={directory / name}" for name in NAMES)


def iteration_s(engine: Engine, num_requests: int, num_tokens: int, adapters: tuple[str, ...]) -> float:
    """Returns the seconds of one iteration, after one that is not counted."""
    num_before = 0 if num_tokens > 1 else CONTEXT
    requests, direct = [], DirectEngine(engine)
    for number in range(num_requests):
        prompt = [1 + (number + k) % 1000 for k in range(num_before + 3 * num_tokens)]
        adapter = adapters[number % len(adapters)] if adapters else ""
        new = NewRequest(RequestId(str(number)), prompt, PARAMS, 0, num_computed=num_before, adapter=adapter)
        requests.append(direct.begin(new))
    work = [(request, num_tokens) for request in requests]
    direct.execute(work)
    direct.grow(work)
    taken = seconds_of(engine.execute, work)
    for request in requests:
        direct.release(request)
    return taken


def main() -> None:
    parser = parser_of(__doc__, rounds=8)
    parser.add_argument("--model", default="qwen3-0.6b", help="a preset")
    parser.add_argument("--num-layers", type=int, default=8, help="number of layers; fewer take less time")
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    presets.PRESETS[args.model] = replace(presets.PRESETS[args.model], num_layers=args.num_layers)
    with tempfile.TemporaryDirectory() as directory:
        modules = write_adapters(Path(directory), presets.PRESETS[args.model], args.rank)
        options: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 2048}
        options |= {"max_num_seqs": 64, "device": "cpu", "use_tqdm": False, "max_lora_rank": args.rank}
        plain = build_engine(EngineConfig(args.model, **options)).engine
        adapted = build_engine(EngineConfig(args.model, lora_modules=modules, **options)).engine
    kinds = {
        "without": (plain, ()),
        "idle": (adapted, ()),
        "one": (adapted, NAMES[:1]),
        "four": (adapted, NAMES),
    }
    print(
        f"{args.model}, {args.num_layers} layers, bfloat16, rank {args.rank}, {torch.get_num_threads()} threads"
    )
    for name, num_requests, num_tokens in BATCHES:
        runs = {
            kind: partial(iteration_s, engine, num_requests, num_tokens, adapters)
            for kind, (engine, adapters) in kinds.items()
        }
        best = {kind: min(times) for kind, times in in_turn(runs, args.rounds).items()}
        line = ", ".join(
            f"{kind} {1e3 * best[kind]:.2f} ms ({best[kind] / best['without']:.3f})" for kind in kinds
        )
        print(f"{name}: {line}", flush=True)


if __name__ == "__main__":
    main()
