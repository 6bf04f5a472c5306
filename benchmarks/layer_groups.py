"""Measures the benefit of freeing passed KV of sliding-window layers, in a model with full-attention layers as well.

It compares blocks of layer groups with blocks of all layers, which are held to a request's end, in the same memory. The
model has the shape of Qwen3-0.6B's layers; five in six slide, as in Gemma 3. All requests are present at the start. The
kinds run in turn, several times. It prints the median output tokens per second, the most requests that ran at once, and
the number of evictions to host memory.

    python -m benchmarks.layer_groups [--num-layers 12] [--window 512] [--prompt 1500] [--output 200] [--requests 16]
        [--room 4] [--rounds 3] [--out FILE]
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from alignedserve.engine.build import build_engine
from alignedserve.engine.choices import block_format
from alignedserve.engine.config import EngineConfig
from alignedserve.engine.engine import Engine
from alignedserve.models import presets
from alignedserve.offline.local_instance import LocalInstance
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import RequestId
from benchmarks.harness import PAGE_AND_JSON, facts, heading, in_turn, parser_of, publish, say, table

MODEL = "qwen3-0.6b"
# Small, because logits are not measured here.
VOCABULARY = 8192
FULL_EVERY = 6
GROUPS, WHOLE = "groups of layers", "all layers"


@dataclass(frozen=True)
class Run:
    kind: str
    seconds: float
    num_tokens: int
    most_running: int
    num_evictions: int

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds


def engines(args: Namespace) -> dict[str, Engine]:
    num_layers = args.num_layers
    windows = tuple(None if (layer + 1) % FULL_EVERY == 0 else args.window for layer in range(num_layers))
    changes = {"num_layers": num_layers, "vocab_size": VOCABULARY, "sliding_windows": windows}
    config = presets.PRESETS[MODEL] = replace(presets.PRESETS[MODEL], **changes)
    longest = args.prompt + args.output
    asked = EngineConfig(
        MODEL,
        load_format="dummy",
        dtype="bfloat16",
        device="cpu",
        max_model_len=longest,
        max_num_seqs=args.requests,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        use_tqdm=False,
    )
    whole = block_format(asked, config, "bfloat16", share_blocks=True)
    asked = replace(asked, kv_cache_memory_bytes=args.room * whole.num_columns(longest) * whole.block_bytes)
    # Blocks that may be filled from both ends hold all layers.
    return {
        GROUPS: build_engine(asked).engine,
        WHOLE: build_engine(asked, has_reversed=True).engine,
    }


def run(kind: str, engine: Engine, args: Namespace) -> tuple[Run, list[list[int]]]:
    instance, outputs = LocalInstance(engine), dict[RequestId, list[int]]()
    params = SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True)
    for number in range(args.requests):
        prompt = [(7 * number + 3 * position) % VOCABULARY for position in range(args.prompt)]
        instance.add_request(RequestId(str(number)), prompt, params, 0)
        outputs[RequestId(str(number))] = []
    begun_s, most = time.perf_counter(), 0
    while instance.num_unfinished:
        for output in instance.step():
            if output.token_id is not None:
                outputs[output.request_id].append(output.token_id)
        most = max(most, len(instance._worker.schedule.blocks.running))
    seconds = time.perf_counter() - begun_s
    instance.check_idle()
    instance.close()
    done = Run(kind, seconds, args.requests * args.output, most, instance.num_evictions)
    say(f"{kind}: {done.rate:.1f} tokens/s, {done.most_running} at once, {done.num_evictions} evictions")
    return done, list(outputs.values())


def page(about: dict[str, Any], runs: Mapping[str, Sequence[Run]], args: Namespace) -> str:
    threads = f"{torch.get_num_threads()} threads."
    rows = [
        (kind, f"{statistics.median(run.rate for run in own):.1f}", own[0].most_running, own[0].num_evictions)
        for kind, own in runs.items()
    ]
    pairs = zip(runs[GROUPS], runs[WHOLE], strict=True)
    ratios = ", ".join(f"{ours.rate / other.rate:.2f}" for ours, other in pairs)
    parts = (
        heading("Layers with a window free the blocks behind it", about, threads),
        f"The model has {args.num_layers} layers of {MODEL}'s shape; five in six have a window of {args.window}. "
        f"{args.requests} requests have prompts of {args.prompt} tokens and outputs of {args.output}. Memory fits "
        f"{args.room} of them if nothing is freed. Both kinds of blocks yield the same tokens.",
        table(("a block holds", "output tokens/s", "most at once", "evictions"), rows),
        f"The ratios of the rates, round by round, are {ratios}.",
    )
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = parser_of(__doc__, rounds=3, out=PAGE_AND_JSON)
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=1500)
    parser.add_argument("--output", type=int, default=200)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--room", type=int, default=4, help="requests that fit if nothing is freed")
    args = parser.parse_args()
    found = in_turn(
        {kind: partial(run, kind, engine, args) for kind, engine in engines(args).items()}, args.rounds
    )
    for (_, ours), (_, others) in zip(found[GROUPS], found[WHOLE], strict=True):
        if ours != others:
            raise RuntimeError("the two kinds say different tokens")
    about, runs = facts(), {kind: [done for done, _ in each] for kind, each in found.items()}
    publish(args.out, page(about, runs, args), about | {"runs": runs})


if __name__ == "__main__":
    main()
