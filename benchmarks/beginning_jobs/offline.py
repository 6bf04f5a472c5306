"""One engine's side of `benchmarks.beginning_jobs`, run with that engine's Python: prints a line of JSON.

PYTHON offline.py alignedserve|vllm MODEL JOB MAX_NUM_SEQS
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import time
import zlib
from typing import Any


def main() -> None:
    engine, model, job, max_num_seqs = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
    module = importlib.import_module(engine)
    own = 0 if job["is_one_prompt"] else job["own"]
    llm = module.LLM(
        model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=job["common"] + own + job["out"] + 16,
        max_num_seqs=max_num_seqs,
        kv_cache_memory_bytes=3 << 30,
        enable_prefix_caching=True,
    )
    dice = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [dice.randrange(5, 30000) for _ in range(count)]

    warming = tokens(64)
    beginnings = [tokens(job["common"]) for _ in range(job["num_beginnings"])]
    given: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    if job["is_one_prompt"]:
        prompts = beginnings
        given |= {"n": job["num_lines"], "temperature": 1.0, "seed": 1}
    else:
        prompts = [beginnings[line % len(beginnings)] + tokens(own) for line in range(job["num_lines"])]
    params = module.SamplingParams(max_tokens=job["out"], **given)
    brief = module.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": warming}], brief, use_tqdm=False)
    begun_s = time.perf_counter()
    results = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - begun_s
    answers = [list(output.token_ids) for result in results for output in result.outputs]
    num_tokens = sum(map(len, answers))
    print(
        json.dumps({"seconds": seconds, "num_tokens": num_tokens, "sum": zlib.crc32(repr(answers).encode())})
    )


if __name__ == "__main__":
    main()
