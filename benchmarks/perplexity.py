"""Perplexity of GGUF files by this engine, transformers and llama.cpp, on the same tokens.

    python -m benchmarks.perplexity FILE... [--tokens 20000] [--llama-perplexity PROGRAM] [--out BASE]

The text is this project's decision records. It is divided into windows of 512 tokens. As in llama.cpp's program, each
window begins with the model's beginning-of-sequence token if it has one, and only the second half of a window counts.

This engine computes with its default dtype, in which the rows that meet quantized weights have eight bits, and in
float32. transformers computes in float32. llama.cpp computes with its defaults.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from alignedserve import LLM, SamplingParams
from alignedserve.models.gguf.directory import directory_of_file
from alignedserve.text.tokenizer import Tokenizer
from benchmarks.harness import PAGE_AND_JSON, ROOT, facts, heading, parser_of, progress, publish, table

WINDOW = 512
# Positions whose logits are in memory at the same time: those of a whole window take a gigabyte if there are 262,144
# tokens.
AT_ONCE = 128

# The log-probabilities of tokens: of all of a window but the first, or of those that count.
Logprobs = Sequence[float]
# What the others are compared with.
PLAIN = "transformers, float32"


def records() -> str:
    """Returns the decision records, in order: pages that hardly change."""
    return "\n".join(path.read_text() for path in sorted((ROOT / "docs/adr").glob("0*.md")))


def windows_of(path: Path, num_tokens: int, length: int = WINDOW) -> list[list[int]]:
    """Returns as many whole windows as `num_tokens` tokens of the records have."""
    tokenizer = Tokenizer.from_directory(directory_of_file(path))
    first, ids = tokenizer.encode("")[:1], tokenizer.encode(records())[:num_tokens]
    starts = range(0, len(ids) - length + 1, length)
    return [[*first, *ids[start + len(first) : start + length]] for start in starts]


def by_this_engine(path: Path, windows: Sequence[Sequence[int]], dtype: str) -> list[Logprobs]:
    llm = LLM(path, dtype=dtype, max_model_len=max(map(len, windows)) + 1, use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    results = llm.generate([{"prompt_token_ids": each} for each in windows], params, use_tqdm=False)
    return [
        [
            each[token].logprob
            for token, each in zip(window[1:], (result.prompt_logprobs or [])[1:], strict=True)
            if each
        ]
        for window, result in zip(windows, results, strict=True)
    ]


def by_transformers(path: Path, windows: Sequence[Sequence[int]]) -> list[Logprobs]:
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.inference_mode():
        return [_logprobs(model, torch.tensor(window)) for window in windows]


def _logprobs(model: Any, ids: torch.Tensor) -> Logprobs:
    states = model.model(ids[None]).last_hidden_state[0, :-1]
    parts = zip(torch.split(states, AT_ONCE), torch.split(ids[1:], AT_ONCE), strict=True)
    losses = [cross_entropy(model.lm_head(each), targets, reduction="none") for each, targets in parts]
    found: list[float] = (-torch.cat(losses)).tolist()
    return found


def by_llama_cpp(program: Path, path: Path, num_windows: int) -> float:
    """Returns the perplexity of the records' first windows."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(records())
        file.flush()
        sizes = f"-c {WINDOW} -b {WINDOW} --chunks {num_windows} -t {os.cpu_count()}".split()
        command = [str(program), "-m", str(path), "-f", file.name, *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", done.stdout + done.stderr)
    if found is None:
        raise RuntimeError(f"{program} printed no perplexity: {done.stderr[-2000:]}")
    return float(found[1])


def second_halves(windows: Iterable[Logprobs]) -> Logprobs:
    return [each for window in windows for each in window[WINDOW // 2 :]]


def perplexity(logprobs: Logprobs) -> float:
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def measure(
    path: Path, windows: Sequence[Sequence[int]], program: Path | None, bar: tqdm[Any]
) -> dict[str, float]:
    """Returns perplexities by what computed them."""
    runs: dict[str, Callable[[], float]] = {
        PLAIN: lambda: perplexity(second_halves(by_transformers(path, windows))),
        "AlignedServe, float32": lambda: perplexity(second_halves(by_this_engine(path, windows, "float32"))),
        "AlignedServe": lambda: perplexity(second_halves(by_this_engine(path, windows, "auto"))),
    }
    if program is not None:
        runs["llama.cpp"] = lambda: by_llama_cpp(program, path, len(windows))
    found = {}
    for name, run in runs.items():
        bar.set_description(f"{path.name}, {name}")
        found[name] = run()
        bar.update()
    return found


def page_of(about: Mapping[str, Any], found: Mapping[str, Mapping[str, float]]) -> str:
    rows = [
        (name, who, f"{each:.4f}", f"{each / by_whom[PLAIN] - 1:+.2%}")
        for name, by_whom in found.items()
        for who, each in by_whom.items()
    ]
    head = ("file", "computed by", "perplexity", "beside float32")
    return f"{heading('Perplexity of GGUF files', about)}\n\n{table(head, rows, 2)}\n"


def main() -> int:
    parser = parser_of(__doc__, out=PAGE_AND_JSON)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens of the text")
    parser.add_argument("--llama-perplexity", type=Path, metavar="PROGRAM", help="llama.cpp's program")
    options = parser.parse_args()
    program: Path | None = options.llama_perplexity
    if options.tokens < 2 * WINDOW:
        parser.error(f"--tokens {options.tokens}: must be at least {2 * WINDOW}")
    found = {}
    with progress((3 + (program is not None)) * len(options.files), "run") as bar:
        for path in options.files:
            found[path.name] = measure(path, windows_of(path, options.tokens), program, bar)
    about = facts({program: "llama-perplexity"} | {path: path.name for path in options.files})
    publish(options.out, page_of(about, found), about | {"perplexity": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
