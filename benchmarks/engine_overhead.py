"""What the engine loop costs per step, without the model's forward call and without sampling.

The engine is the real one; its model returns at once and its sampler answers with a constant. All requests decode.

    python benchmarks/engine_overhead.py [--batch 64] [--context 1000] [--steps 400]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from alignedserve.config import EngineConfig
from alignedserve.engine.build import build_engine
from alignedserve.engine.sampler import Sampled
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import RequestId

CONFIG = """{"architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 64,
"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 4096,
"rms_norm_eps": 1e-5, "torch_dtype": "float32"}"""


class NoModel:
    def forward(self) -> None:
        return None

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


class NoSampler:
    def sample(self, model: NoModel, rows: torch.Tensor, requests: list) -> Sampled:
        return Sampled([7] * len(requests))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(CONFIG)
        engine = build_engine(EngineConfig(directory, load_format="dummy", use_tqdm=False)).engine
    engine._runner._model, engine._runner._sampler = NoModel(), NoSampler()
    params = SamplingParams(temperature=0, max_tokens=args.steps + 50, ignore_eos=True)
    for index in range(args.batch):
        engine.add_request(RequestId(str(index)), [1] * args.context, params, 0)
    while any(request.num_pending > 1 for request in engine._requests.values()) or engine._queues.waiting:
        engine.step()
    times = []
    for _ in range(args.steps):
        start = time.perf_counter()
        events = engine.step()
        times.append((time.perf_counter() - start) * 1e3)
        assert len(events) == args.batch
    p50, p99 = statistics.median(times), statistics.quantiles(times, n=100)[98]
    print(f"batch {args.batch}, context {args.context}: {p50:.3f} ms a step (median), {p99:.3f} ms (p99)")


if __name__ == "__main__":
    main()
