"""Measures the throughput of 256 simultaneous requests, as small engines do.

Input and output lengths are uniform in 100 to 1024, seed 0. No request stops early, max_model_len is 4096, and decoding
is greedy, or samples. A first run of the same prompts with two output tokens each compiles and captures, and is not
timed.
"""

from __future__ import annotations

import time
from typing import Any

from alignedserve.offline.llm import LLM, SamplingParams
from benchmarks.gpu.bench import Bench, free_memory
from benchmarks.gpu.decoding import kernel_option
from benchmarks.gpu.models import config_of, source_of
from benchmarks.gpu.record import Row
from benchmarks.gpu.workload import Asked, uniform

MODELS = ("qwen3-0.6b", "llama-3.1-8b")


def rates(asked: Asked, seconds: float) -> dict[str, float]:
    return {
        "seconds": seconds,
        "num_input_tokens": asked.num_input_tokens,
        "num_output_tokens": asked.num_output_tokens,
        "output_tokens_per_s": asked.num_output_tokens / seconds,
        "tokens_per_s": (asked.num_input_tokens + asked.num_output_tokens) / seconds,
    }


def run(bench: Bench) -> None:
    for model in bench.models(*MODELS):
        asked = requests(bench, model)
        bench.case(f"{model} ours", ours, bench, model, asked, needs_s=bench.pick(20, 1))
        sampled = f"{model} ours, temperature 0.6"
        bench.case(sampled, ours, bench, model, asked, 0.6, needs_s=bench.pick(20, 1))


def requests(bench: Bench, model: str) -> Asked:
    shortest, longest = bench.pick(100, 4), bench.pick(1024, 12)
    return uniform(bench.pick(256, 6), shortest, longest, config_of(model, bench).vocab_size)


def ours(bench: Bench, model: str, asked: Asked, temperature: float = 0.0) -> Row:
    prompts = [{"prompt_token_ids": prompt} for prompt in asked.prompts]

    def params(count: int) -> SamplingParams:
        return SamplingParams(
            temperature=temperature, seed=0, max_tokens=count, ignore_eos=True, detokenize=False
        )

    llm = LLM(source_of(model, bench), **our_options(bench))
    try:
        llm.generate(prompts, params(2), use_tqdm=False)
        bench.synchronize()
        begin = time.perf_counter()
        results = llm.generate(prompts, [params(count) for count in asked.num_outputs], use_tqdm=False)
        seconds = time.perf_counter() - begin
    finally:
        llm.engine.reset()
        del llm
        free_memory()
    got = [list(result.outputs[0].token_ids) for result in results]
    if [len(tokens) for tokens in got] != asked.num_outputs:
        raise RuntimeError(f"{sum(map(len, got))} tokens instead of {asked.num_output_tokens}")
    row: Row = {"model": model, **rates(asked, seconds), "first_tokens": got[0][:8]}
    return row | {"summary": summary(row)}


def our_options(bench: Bench) -> dict[str, Any]:
    sizes = {"kv_cache_memory_bytes": 64 << 20} if bench.options.is_tiny else {}
    return sizes | {
        "load_format": "dummy",
        "device": str(bench.device),
        "attention_backend": bench.options.backend,
        "skip_tokenizer_init": True,
        # Prompts run twice, once to warm up.
        "enable_prefix_caching": False,
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "use_tqdm": False,
        **kernel_option(bench.options.decode_kernels[0]),
    }


def summary(row: Row) -> str:
    output, both = row["output_tokens_per_s"], row["tokens_per_s"]
    return f"{output:9.0f} output tokens/s, {both:9.0f} in all, {row['seconds']:.1f} s"
