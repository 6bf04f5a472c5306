"""Log-probabilities of GGUF files by this engine and by transformers, on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from alignedserve import LLM, SamplingParams
from alignedserve.models.gguf.directory import directory_of_file
from alignedserve.text.tokenizer import Tokenizer

# Pages that hardly change.
RECORDS = Path(__file__).parents[1] / "docs/adr"
# Positions whose logits are in memory at the same time: those of a whole window take a gigabyte if there are 262,144
# tokens.
AT_ONCE = 128

Logprobs = Sequence[float]


def windows_of(path: Path, num_tokens: int, length: int) -> list[list[int]]:
    """Returns as many whole windows as the first `num_tokens` tokens of the decision records have."""
    text = "\n".join(page.read_text() for page in sorted(RECORDS.glob("0*.md")))
    tokenizer = Tokenizer.from_directory(directory_of_file(path))
    first, ids = tokenizer.encode("")[:1], tokenizer.encode(text)[:num_tokens]
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


def perplexity(logprobs: Logprobs) -> float:
    return math.exp(-math.fsum(logprobs) / len(logprobs))
