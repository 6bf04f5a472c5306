"""Compares one stream on a CPU with llama.cpp: same model, prompt and cores, in turn, for several weight formats.

    python -m benchmarks.cpu_vs_llama_cpp --llama-python VENV/bin/python [--rounds 5] [--out FILE]

The venv has llama-cpp-python and gguf, built for this processor. The model is a random-weight Llama with 500M
parameters in bfloat16. llama.cpp gets it as BF16, Q8_0 and Q4_0; this engine quantises it to int8 and int4. Both use
all cores. Rates exclude the time to first token. Ratios are computed per round. In bfloat16 both begin with the same
tokens.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from alignedserve import LLM, SamplingParams
from benchmarks.cpu_vs_vllm import make_model
from benchmarks.harness import JSON_FILE, facts, in_turn, median_ratio, parser_of, progress, say, write_json

SHAPE = {
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
}
# Our quantization and llama.cpp's format.
PAIRS: tuple[tuple[str | None, str], ...] = ((None, "bf16"), ("int8", "q8_0"), ("int4", "q4_0"))
PROMPT = list(range(100, 132))
NUM_TOKENS = 64
SCRIPT = str(Path(__file__).parent / "llama_cpp_offline.py")


def ours(llm: LLM) -> tuple[float, list[int]]:
    times, said = [], []
    for count in (1, NUM_TOKENS + 1):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        begun_s = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        times.append(time.perf_counter() - begun_s)
        said = list(output.outputs[0].token_ids)
    return NUM_TOKENS / (times[1] - times[0]), said


def theirs(python: str, path: Path, out: Path) -> tuple[float, list[int]]:
    command = [python, SCRIPT, "rate", str(path), "--prompt", ",".join(map(str, PROMPT)), "--out", str(out)]
    command += ["--num-tokens", str(NUM_TOKENS), "--num-threads", str(torch.get_num_threads())]
    subprocess.run(command, check=True, capture_output=True)
    found: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    return float(found["tokens_per_s"]), list(found["tokens"])


def main() -> int:
    parser = parser_of(__doc__, rounds=5, out=JSON_FILE)
    parser.add_argument("--llama-python", required=True)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    options = parser.parse_args()
    pairs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory, progress(2 * len(PAIRS) * options.rounds, "run") as bar:
        model, converted, out = (Path(directory, name) for name in ("model", "converted", "out.jsonl"))
        bar.set_description("making the model")
        make_model(model, **SHAPE | {"num_hidden_layers": options.layers})
        command = [options.llama_python, SCRIPT, "convert", str(model), "--to", str(converted)]
        subprocess.run(command, check=True, capture_output=True)
        for quantization, name in PAIRS:
            llm = LLM(
                str(model),
                dtype="bfloat16",
                quantization=quantization,
                skip_tokenizer_init=True,
                max_model_len=1024,
                kv_cache_memory_bytes=1 << 28,
                use_tqdm=False,
            )
            peer = partial(theirs, options.llama_python, Path(f"{converted}-{name}.gguf"), out)
            found = in_turn({"alignedserve": partial(ours, llm), "llama_cpp": peer}, options.rounds, bar=bar)
            rounds = {engine: [rate for rate, _ in each] for engine, each in found.items()}
            ratio = median_ratio(rounds["alignedserve"], rounds["llama_cpp"])
            tokens = [each[-1][1] for each in found.values()]
            same = len(list(takewhile(lambda each: each[0] == each[1], zip(*tokens, strict=True))))
            pairs.append(
                {"ours": quantization or "bfloat16", "theirs": name, "rounds": rounds, "median_ratio": ratio}
                | {"first_same_tokens": same}
            )
            medians = {engine: round(statistics.median(each), 1) for engine, each in rounds.items()}
            say(f"{name}: {medians} tokens/s, median ratio {ratio:.2f}; the first {same} tokens the same")
    write_json(options.out, facts({options.llama_python: "VENV/bin/python"}) | {"pairs": pairs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
