"""Greedy tokens equal transformers' in float32, and nothing that moves or splits work changes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models
from tests.engine.helpers import EvictEveryStep, greedy_params, make_instance, run, tokens
from tests.tiny_models import CONFIGS, greedy, prompts

Directory = Callable[[str], Path]
BACKENDS = ["torch", "cpu"]
# One of each architecture.
QUICK = (
    "llama-gqa-tied",
    "mistral-window",
    "qwen3",
    "phi3-partial-window",
    "gemma3",
    "gpt-oss",
    "mixtral",
    "opt",
)
# Every family runs on the CPU backend each time, and some on the other.
ONE_ALWAYS = ["cpu", pytest.param("torch", marks=[pytest.mark.slow, pytest.mark.drawn(one_in=3)])]


@pytest.mark.parametrize("backend", ONE_ALWAYS)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK))
        # Those with states are in test_states.py: transformers' cache has no place for these.
        for name in sorted({*CONFIGS} - {"phi3-longrope", "fading-sum", "fading-sum-alone"})
    ],
)
def test_every_family_matches_transformers(tiny_model: Directory, family: str, backend: str) -> None:
    engine = make_instance(tiny_model(family), attention_backend=backend)
    assert tokens(run(engine, prompts(), greedy_params())) == greedy(tiny_model(family))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_long", [False, True])
def test_longrope_matches_transformers(tiny_model: Directory, is_long: bool, backend: str) -> None:
    """With the long factors for any length in a model which takes more than the original 32 tokens: transformers has
    those once a sequence is longer."""
    directory = tiny_model("phi3-longrope")
    engine = make_instance(directory, attention_backend=backend, max_model_len=None if is_long else 32)
    some = [number for number, prompt in enumerate(prompts()) if (len(prompt) > 32) == is_long]
    num_new = 64 if is_long else 32 - max(len(prompts()[number]) for number in some)
    said = tokens(run(engine, [prompts()[number] for number in some], greedy_params(num_new)))
    assert said == [greedy(directory)[number][:num_new] for number in some]


@pytest.mark.slow
@pytest.mark.drawn(one_in=6)
@pytest.mark.parametrize(
    "options",
    [
        {"max_prefill_chunk": 1},
        {"max_prefill_chunk": 7, "block_size": 8},
        {"max_prefill_chunk": 64, "block_size": 32},
        {"max_num_batched_tokens": 50},
        {"max_num_seqs": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "family", ["llama-gqa-tied", "mistral-window", "gemma3", "opt", "qwen3-moe", "gpt-oss"]
)
def test_chunks_blocks_and_batches_change_nothing(
    tiny_model: Directory, family: str, backend: str, options: dict[str, Any]
) -> None:
    engine = make_instance(tiny_model(family), attention_backend=backend, **options)
    assert tokens(run(engine, prompts(), greedy_params())) == greedy(tiny_model(family))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("family", "block_size"),
    [
        ("llama-gqa-tied", 8),
        *(
            pytest.param(family, 16, marks=[pytest.mark.slow, pytest.mark.drawn(one_in=3)])
            for family in ("llama-gqa-tied", "mixtral")
        ),
    ],
)
def test_preemption_at_every_step_changes_nothing(
    tiny_model: Directory, backend: str, family: str, block_size: int
) -> None:
    directory = tiny_model(family)
    engine = make_instance(
        directory, EvictEveryStep, attention_backend=backend, block_size=block_size, max_prefill_chunk=40
    )
    assert tokens(run(engine, prompts(), greedy_params())) == greedy(directory)


def test_too_few_blocks_for_all_preempt_and_change_nothing(tiny_model: Directory) -> None:
    """Room for one request of the longest kind, and nine to run: they take turns."""
    directory = tiny_model("qwen2")
    block_bytes = 3 * 2 * 16 * 2 * 16 * 4
    engine = make_instance(directory, kv_cache_memory_bytes=block_bytes * (tiny_models.MAX_LEN // 16))
    assert tokens(run(engine, prompts(), greedy_params())) == greedy(directory)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_at_a_time_equals_all_at_once(tiny_model: Directory, backend: str) -> None:
    directory = tiny_model("qwen3")
    engine = make_instance(directory, attention_backend=backend)
    alone = [tokens(run(engine, [prompt], greedy_params()))[0] for prompt in prompts()]
    assert alone == greedy(directory)
