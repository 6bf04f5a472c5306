"""256 requests at once, as the small engines measure throughput: ours, and transformers' continuous batching beside it.

Input and output lengths are uniform in 100 to 1024, seed 0; no request stops early; max_model_len is 4096; greedy. Both
have the same random weights. A first run of the same prompts with two output tokens each, not timed, compiles and
captures. transformers runs in a process of its own (`transformers_batching.py`), after ours has given the GPU back;
what it can do is measured in each of its ways to attend that work without a download.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from alignedserve.offline.llm import LLM, SamplingParams
from benchmarks.gpu.bench import Bench, free_memory
from benchmarks.gpu.decoding import kernel_option
from benchmarks.gpu.models import config_of, source_of
from benchmarks.gpu.record import ROOT, Row
from benchmarks.gpu.workload import Asked, uniform

MODELS = ("qwen3-0.6b", "llama-3.1-8b")
# attention, CUDA graphs, the next batch prepared beside the GPU. `torch_varlen`: FlashAttention as torch has it;
# `sdpa`: what it takes by itself, with its own choices for that
THEIR_WAYS = (("torch_varlen", True, True), ("torch_varlen", False, True), ("sdpa", False, False))
# to start Python, import and build
THEIR_START_S = 30.0


def rates(asked: Asked, seconds: float) -> dict[str, float]:
    return {
        "seconds": seconds,
        "num_input_tokens": asked.num_input_tokens,
        "num_output_tokens": asked.num_output_tokens,
        "output_tokens_per_s": asked.num_output_tokens / seconds,
        "tokens_per_s": (asked.num_input_tokens + asked.num_output_tokens) / seconds,
    }


def run(bench: Bench) -> None:
    ways = THEIR_WAYS if bench.is_cuda else THEIR_WAYS[-1:]
    for model in bench.models(*MODELS):
        asked = requests(bench, model)
        bench.case(f"{model} ours", ours, bench, model, asked, needs_s=bench.pick(20, 1))
        for attention, has_graphs, is_async in ways:
            name = f"{model} transformers {attention}{' graphs' * has_graphs}{' async' * is_async}"
            bench.case(name, theirs, bench, model, attention, has_graphs, is_async, needs_s=bench.pick(45, 1))
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
    row: Row = {"model": model, "engine": "ours", **rates(asked, seconds), "first_tokens": got[0][:8]}
    return row | {"summary": summary(row)}


def our_options(bench: Bench) -> dict[str, Any]:
    sizes = {"kv_cache_memory_bytes": 64 << 20} if bench.options.is_tiny else {}
    return sizes | {
        "load_format": "dummy",
        "device": str(bench.device),
        "attention_backend": bench.options.backend,
        "skip_tokenizer_init": True,
        # they run twice, once to warm up
        "enable_prefix_caching": False,
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "use_tqdm": False,
        **kernel_option(bench.options.decode_kernels[0]),
    }


def theirs(bench: Bench, model: str, attention: str, has_graphs: bool, is_async: bool) -> Row:
    asked, config = requests(bench, model), config_of(model, bench)
    limit_s = max(5.0, bench.seconds_left - bench.pick(int(THEIR_START_S), 5))
    job = {
        "config": asdict(config),
        "device": str(bench.device),
        "prompts": asked.prompts,
        "num_outputs": asked.num_outputs,
        "attention": attention,
        "has_graphs": has_graphs,
        "is_async": is_async,
        "limit_s": limit_s,
    }
    found = run_theirs(bench.out, job, timeout_s=limit_s + 2 * THEIR_START_S)
    if not found["is_finished"]:
        found |= {
            "summary": f"{found['num_done']} of {asked.num_output_tokens} tokens in {found['seconds']:.0f} s"
        }
        return {"model": model, "engine": "transformers", **found}
    row: Row = {"model": model, "engine": "transformers", **found, **rates(asked, found["seconds"])}
    return row | {"summary": summary(row)}


def run_theirs(out: Path, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    asked, answer = out / "transformers_job.json", out / "transformers_answer.json"
    asked.write_text(json.dumps(job))
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.transformers_batching", str(asked), str(answer)]
    with (out / "transformers.log").open("a") as log:
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=timeout_s, check=False)
    if done.returncode != 0 or not answer.exists():
        tail = (out / "transformers.log").read_text()[-2000:]
        raise RuntimeError(f"transformers ended with {done.returncode}: {tail}")
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def summary(row: Row) -> str:
    output, both = row["output_tokens_per_s"], row["tokens_per_s"]
    return f"{output:9.0f} output tokens/s, {both:9.0f} in all, {row['seconds']:.1f} s"
