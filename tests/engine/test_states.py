"""A made-up layer with a state in place of K and V (`layer_with_state.py`): the tokens are transformers', however a
prompt is cut, whatever leaves and comes back, and wherever a prompt begins like another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignedserve.engine.choices import block_format, check_model, choose_layer_groups
from alignedserve.engine.config import EngineConfig
from alignedserve.kv.groups import STATE_WINDOW
from alignedserve.models.hf_config import load_model_config
from tests.engine.helpers import EvictEveryStep, greedy_params, make_instance, run, tokens
from tests.engine.test_prefix_cache import BLOCK, BRANCH, LONG, alone, counted, make_counting
from tests.engine.test_windows import poison_what_is_passed
from tests.island import Island
from tests.tiny_models import logprobs, prompts

Directory = Callable[[str], Path]
# Some of their layers have a state, or all.
every_family = pytest.mark.parametrize("family", ["fading-sum", "fading-sum-alone"])
NUM_NEW = 40


def check_tokens(directory: Path, found: list[list[int]]) -> None:
    """Each is the likeliest one in transformers' model."""
    for prompt, answer in zip(prompts(), found, strict=True):
        likeliest = logprobs(directory, prompt + answer[:-1])[len(prompt) - 1 :].argmax(dim=-1)
        assert len(answer) == NUM_NEW and answer == likeliest.tolist()


@every_family
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 8, "max_prefill_chunk": 7},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 50}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_are_transformers_however_a_prompt_is_cut(
    tiny_model: Directory, family: str, options: dict[str, Any]
) -> None:
    directory = tiny_model(family)
    instance = make_instance(directory, enable_prefix_caching=False, max_num_seqs=9, **options)
    passed = poison_what_is_passed(instance.engine, instance._worker.memory)
    found = tokens(run(instance, prompts(), greedy_params(NUM_NEW)))
    check_tokens(directory, found)
    assert sum(passed) > 2


@pytest.mark.slow
def test_a_state_is_not_rounded_to_8_bits_as_k_and_v_are(tiny_model: Directory) -> None:
    directory = tiny_model("fading-sum-alone")
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "int8", "block_size": 64}
    instance = make_instance(directory, enable_prefix_caching=False, max_num_seqs=9, **options)
    poison_what_is_passed(instance.engine, instance._worker.memory)
    check_tokens(directory, tokens(run(instance, prompts(), greedy_params(NUM_NEW))))


@every_family
def test_a_state_that_leaves_after_each_token_goes_on_where_it_was(
    tiny_model: Directory, family: str
) -> None:
    directory = tiny_model(family)
    instance = make_instance(directory, EvictEveryStep, max_prefill_chunk=40)
    check_tokens(directory, tokens(run(instance, prompts(), greedy_params(NUM_NEW))))
    assert instance.num_evictions > 9


@every_family
def test_an_island_moves_states_with_the_rest(tiny_model: Directory, family: str) -> None:
    """Prompts are handed over, and running requests leave and come back at any token."""
    directory = tiny_model(family)

    def meddle(island: Island) -> None:
        for entry in island.in_place("running"):
            if (island.num_turns + entry.key) % 3 == 0:
                island.evict(entry)

    island = Island(directory, meddle=meddle)
    found = island.run(prompts(), [greedy_params(NUM_NEW)] * len(prompts()))
    check_tokens(directory, found)
    assert island.num_evicted > 20


@every_family
def test_a_prompt_goes_on_from_the_state_after_a_whole_column(tiny_model: Directory, family: str) -> None:
    directory, params = tiny_model(family), greedy_params(4)
    instance = make_counting(directory)
    ((*answer,),) = tokens(run(instance, [LONG], params))
    assert counted(instance) == 300 + 3
    turn = [*LONG, *answer, 1, 2, 3]
    for prompt, num_known in ((turn, 303), (LONG, 299), (LONG[:97], 96), (LONG[:96], 95), (BRANCH, 96)):
        assert tokens(run(instance, [prompt], params)) == [alone(directory, prompt, params)]
        assert counted(instance) <= len(prompt) - num_known // BLOCK * BLOCK + 3


@every_family
def test_a_request_holds_the_block_before_its_next_token(tiny_model: Directory, family: str) -> None:
    span = make_instance(tiny_model(family), max_num_batched_tokens=32)._worker.memory.span
    assert (span.window, span.has_state) == (STATE_WINDOW, True)
    assert [span.num_passed(num_cached) for num_cached in (0, 16, 17, 32, 33)] == [0, 0, 1, 1, 2]
    # A state goes on only where it was saved.
    assert [span.num_usable(num_saved, 20) for num_saved in (16, 19, 20)] == [16, 19, 0]


def test_what_needs_k_and_v_in_all_layers_is_refused(tiny_model: Directory) -> None:
    directory = tiny_model("fading-sum")
    model = load_model_config(directory)

    def config(**options: Any) -> EngineConfig:
        return EngineConfig(model=str(directory), **options)

    with pytest.raises(ValueError, match="hidden_cache: this model has layers with a state"):
        choose_layer_groups(config(hidden_cache=True), model, share_blocks=False)
    with pytest.raises(ValueError, match="share_blocks: this model has layers with a state"):
        choose_layer_groups(config(), model, share_blocks=True)
    with pytest.raises(ValueError, match="tensor_parallel_size=2: this model has layers with a state"):
        check_model(config(tensor_parallel_size=2), model)
    with pytest.raises(ValueError, match="pool_kv_dtype='int8': must be auto for a model"):
        block_format(config(), model, "float32").in_pool("int8")
    # A token of a layer has 64 values as int8, and a state 128 bytes.
    with pytest.raises(ValueError, match="block_size=1: .* must be at least 2"):
        block_format(config(block_size=1, kv_cache_dtype="fp8"), model, "float32")
    with pytest.raises(
        ValueError, match="attention_backend='cpu': must be torch for a model that has layers"
    ):
        check_model(config(attention_backend="cpu"), model)
    for sizes in ((128,), (128, 0, 130)):
        with pytest.raises(ValueError, match="must be those of float32 values in each of 3 layers"):
            check_model(config(), dataclasses.replace(model, state_bytes=sizes))
