"""Published files give transformers' tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from alignedserve import LLM, SamplingParams
from tests import real_weights

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Deutschland ist",
    "In 1969, the first man on the moon",
    "1, 1, 2, 3, 5, 8, 13,",
    "今日の天気は",
]
NUM_NEW = 40
# Its words are single digits, which transformers leaves together.
HAS_SINGLE_DIGITS = "SmolLM2"

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=8, turn=7)]


@pytest.fixture(scope="module", params=[real_weights.smollm2, real_weights.gemma3])
def path(request: pytest.FixtureRequest) -> Path:
    found: Callable[[], Path] = request.param
    return found()


@pytest.fixture
def llm(path: Path) -> LLM:
    return LLM(path, dtype="float32", max_model_len=512, use_tqdm=False)


def test_greedy_tokens_are_those_of_transformers(path: Path, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    found = [[*each.outputs[0].token_ids] for each in llm.generate(PROMPTS, params)]
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    for prompt, mine in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt)])
        options: Any = dict(do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=None, pad_token_id=0)
        theirs = model.generate(ids, **options)  # type: ignore[misc]
        assert mine == theirs[0, ids.shape[1] :].tolist(), prompt


def test_its_tokenizer_is_that_of_transformers(path: Path, llm: LLM) -> None:
    mine = llm.get_tokenizer()
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    rng = random.Random(0)
    vocabulary = [mine.decode([token]) for token in rng.sample(range(mine.vocab_size), 3000)]
    texts = ["".join(rng.choices(vocabulary, k=rng.randint(1, 12))) for _ in range(2000)]
    for text in texts:
        if HAS_SINGLE_DIGITS not in path.name or not any(each.isnumeric() for each in text):
            assert mine.encode(text) == theirs(text)["input_ids"], text
