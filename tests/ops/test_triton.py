"""The CUDA backend through the whole engine: on a GPU if there is one, else in Triton's interpreter.

That takes a hundred times as long as the other backends, so outputs are short here, and prompts few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.kernels.triton import shared_plan
from alignedserve.offline.local_instance import LocalInstance
from alignedserve.sampling_params import SamplingParams
from alignedserve.scheduling.policies import Policy
from tests.engine.helpers import EvictEveryStep, greedy_params, make_instance, run, tokens
from tests.tiny_adapters import merge, write_adapter
from tests.tiny_models import VOCAB_SIZE, greedy, prompts

Directory = Callable[[str], Path]
NUM_NEW = 5
in_turn = [pytest.mark.slow, pytest.mark.drawn(one_in=8, turn=5)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def triton_engine(directory: Path, policy: type[Policy] | None = None, **options: Any) -> LocalInstance:
    return make_instance(
        directory, policy, attention_backend="triton", device=DEVICE, dtype="float32", **options
    )


def chosen(numbers: Sequence[int]) -> list[list[int]]:
    return [prompts()[number] for number in numbers]


def expected(directory: Path, numbers: Sequence[int]) -> list[list[int]]:
    """transformers' tokens."""
    return [greedy(directory)[number][:NUM_NEW] for number in numbers]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "llama-gqa-tied",
        # It has all that others have but norms of q and k, layer norms, and a head in parts.
        pytest.param("gpt-oss", marks=pytest.mark.slow),
        *(
            pytest.param(each, marks=in_turn)
            for each in (
                "gemma3",
                "opt",
                "qwen3",
                "mistral-window",
                "phi3-partial-window",
                "qwen3-moe",
                "mixtral",
            )
        ),
    ],
)
def test_chunks_and_decodes_match_transformers(tiny_model: Directory, family: str) -> None:
    """Prompts longer and shorter than a chunk, and than the window of 24."""
    directory, numbers = tiny_model(family), (1, 5)
    engine = triton_engine(directory, max_prefill_chunk=16)
    assert tokens(run(engine, chosen(numbers), greedy_params(NUM_NEW))) == expected(directory, numbers)


@pytest.mark.slow
def test_a_prefix_that_requests_share_is_read_once(
    tiny_model: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are those of requests that read alone, in steps of three and then of two sequences."""
    monkeypatch.setattr(shared_plan, "MIN_SAVED_PER_ROW", 1)
    monkeypatch.setattr(shared_plan, "MIN_SAVED_BYTES", 0)
    num_tasks: list[int] = []
    fill = shared_plan.SharedPlan._fill

    def noted(plan: shared_plan.SharedPlan, count: int) -> None:
        num_tasks.append(count)
        fill(plan, count)

    monkeypatch.setattr(shared_plan.SharedPlan, "_fill", noted)
    common = [number * 7 % VOCAB_SIZE for number in range(70)]
    asked = [[*common, number] for number in range(3)]
    params = [greedy_params(num_new) for num_new in (3, NUM_NEW, NUM_NEW)]
    directory = tiny_model("llama-gqa-tied")
    found = run(triton_engine(directory, decode_kernel="shared"), asked, params)
    assert tokens(found) == tokens(run(make_instance(directory, dtype="float32"), asked, params))
    assert num_tasks.count(1) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-gqa-tied", pytest.param("opt", marks=in_turn)])
def test_each_row_has_its_own_adapter(tiny_model: Directory, family: str, tmp_path: Path) -> None:
    """Steps in which some row has one are neither filled up nor captured, and others are."""
    directory, numbers = tiny_model(family), (1, 5, 2)
    paths = [write_adapter(tmp_path / name, directory, seed) for seed, name in enumerate("ab")]
    merged = [directory, *(merge(path / "merged", directory, path) for path in paths)]
    modules = tuple(f"{path.name}={path}" for path in paths)
    engine = triton_engine(directory, max_prefill_chunk=16, lora_modules=modules)
    found = tokens(run(engine, chosen(numbers), greedy_params(NUM_NEW), ["", "a", "b"]))
    each = zip(merged, numbers, strict=True)
    assert found == [greedy(model)[number][:NUM_NEW] for model, number in each]
    plain = run(engine, chosen(numbers), greedy_params(NUM_NEW))
    assert tokens(plain) == expected(directory, numbers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [pytest.param({"block_size": 8}, marks=in_turn), {"max_num_batched_tokens": 20}],
    ids=str,
)
def test_preemption_at_every_step_changes_nothing(tiny_model: Directory, options: dict[str, Any]) -> None:
    directory, numbers = tiny_model("llama-gqa-tied"), (1, 4)
    engine = triton_engine(directory, EvictEveryStep, **options)
    assert tokens(run(engine, chosen(numbers), greedy_params(NUM_NEW))) == expected(directory, numbers)


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_kv_in_8_bits_says_what_plain_torch_says(tiny_model: Directory, kv_cache_dtype: str) -> None:
    directory, some = tiny_model("llama-gqa-tied"), chosen((1, 5))
    engine = triton_engine(directory, EvictEveryStep, max_prefill_chunk=16, kv_cache_dtype=kv_cache_dtype)
    plain = make_instance(directory, attention_backend="torch", kv_cache_dtype=kv_cache_dtype)
    params = greedy_params(NUM_NEW)
    assert tokens(run(engine, some, params)) == tokens(run(plain, some, params))


def random_params() -> list[SamplingParams]:
    each: list[dict[str, Any]] = [
        {},
        {"top_k": 20},
        {"top_p": 0.9, "temperature": 1.5},
        {"min_p": 0.05},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.01, "temperature": 0.7},
        {"temperature": 0},
        {"logit_bias": {3: 2.0, 5: -3.0}, "top_p": 0.5},
        {"repetition_penalty": 1.3, "logprobs": 2},
        {"allowed_token_ids": [3, 5, 7, 150], "bad_word_ids": [[5], [3, 7], [7, 7]], "top_k": 3},
    ]
    common = {"temperature": 1.0, "max_tokens": 4, "ignore_eos": True}
    return [SamplingParams(**common | changes, seed=seed) for seed, changes in enumerate(each)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [slice(0, 1), pytest.param(slice(0, 9), marks=in_turn)],
    ids=["temperature alone", "all"],
)
def test_random_tokens_equal_those_of_plain_torch(tiny_model: Directory, kinds: slice) -> None:
    directory, params = tiny_model("llama-gqa-tied"), random_params()[kinds]
    some = [prompts()[1]] * len(params)
    plain = make_instance(directory, attention_backend="torch")
    assert tokens(run(triton_engine(directory), some, params)) == tokens(run(plain, some, params))


@pytest.mark.slow
def test_broken_logits_end_their_request_alone(tiny_model: Directory) -> None:
    engine = triton_engine(tiny_model("llama-gqa-tied"))
    model = engine.engine._runner._model
    plain = model.logits

    def broken(rows: torch.Tensor) -> torch.Tensor:
        logits = plain(rows)
        logits[0, VOCAB_SIZE // 2] = float("nan")
        return logits

    model.logits = broken  # type: ignore[method-assign]
    params = [SamplingParams(seed=1, top_k=9, max_tokens=2, ignore_eos=True)] * 2
    lost, other = run(engine, chosen([1, 2]), params)
    assert [event.finish_reason for event in lost] == ["error"]
    # then it is alone, and its row the first
    assert [event.finish_reason for event in other] == [None, "error"]
