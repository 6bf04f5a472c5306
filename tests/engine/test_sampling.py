"""Seeds, penalties, truncation, stops and log-probabilities, through the whole engine."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from alignedserve.engine.batch import Due
from alignedserve.engine.request import Request
from alignedserve.engine.sampler import _edit_all
from alignedserve.offline.local_instance import LocalInstance
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import RequestId
from tests import tiny_models
from tests.engine.helpers import EvictEveryStep, greedy_params, make_instance, run, tokens
from tests.tiny_models import VOCAB_SIZE, greedy, prompts

Directory = Callable[[str], Path]
FAMILY = "llama-gqa-tied"


@pytest.fixture(scope="module")
def directory(tiny_model: Directory) -> Path:
    return tiny_model(FAMILY)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[LocalInstance]:
    engine = make_instance(directory)
    yield engine
    engine.check_idle()


# Every token ends one of them after some other tokens.
FORBIDDEN = [[5], *([before, last] for before in range(0, VOCAB_SIZE, 2) for last in range(0, VOCAB_SIZE, 4))]


def seeded(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 40, "ignore_eos": True, "seed": 7, **changes})


def mixed_params() -> list[SamplingParams]:
    """One for each of `prompts()`, every knob in use somewhere."""
    return [
        seeded(),
        seeded(seed=8, top_k=20),
        seeded(seed=9, top_p=0.9, temperature=1.5),
        seeded(seed=10, min_p=0.05, allowed_token_ids=list(range(0, VOCAB_SIZE, 3))),
        seeded(seed=11, repetition_penalty=1.3),
        seeded(seed=12, presence_penalty=0.5, frequency_penalty=0.7, bad_word_ids=FORBIDDEN),
        seeded(seed=13, logit_bias={3: 2.0, 5: -3.0}, top_p=0.5),
        greedy_params(40),
        seeded(seed=14, top_k=5, top_p=0.8, min_p=0.01, temperature=0.7),
    ]


@pytest.mark.parametrize("backend", [pytest.param("torch", marks=pytest.mark.slow), "cpu"])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_prefill_chunk": 7, "block_size": 8}, {"max_num_seqs": 1}, {"policy": EvictEveryStep}],
    ids=["plain", "chunks", "alone", "preempted"],
)
def test_seeded_tokens_do_not_depend_on_how_they_were_run(
    directory: Path, engine: LocalInstance, options: dict[str, Any], backend: str
) -> None:
    expected = tokens(run(engine, prompts(), mixed_params()))
    other = make_instance(directory, attention_backend=backend, **options)
    assert tokens(run(other, prompts(), mixed_params())) == expected


def test_another_seed_gives_other_tokens(engine: LocalInstance) -> None:
    outputs = tokens(run(engine, [prompts()[3]] * 3, [seeded(seed=1), seeded(seed=1), seeded(seed=2)]))
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize("changes", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_the_narrowest_choice_is_greedy(
    engine: LocalInstance, directory: Path, changes: dict[str, Any]
) -> None:
    outputs = tokens(run(engine, prompts(), seeded(**changes)))
    assert outputs == [expected[:40] for expected in greedy(directory)]


def test_tokens_are_drawn_with_the_models_probabilities(engine: LocalInstance, directory: Path) -> None:
    """4,000 draws of one token against its distribution: chi-square, 1 in 10,000 to fail if all is right."""
    prompt, num_draws = prompts()[4], 4000
    params = [seeded(seed=seed, max_tokens=1) for seed in range(num_draws)]
    drawn = torch.tensor(tokens(run(engine, [prompt] * num_draws, params))).flatten()
    expected = tiny_models.logprobs(directory, prompt)[-1].exp() * num_draws
    is_common = expected >= 5
    observed = torch.bincount(drawn, minlength=VOCAB_SIZE).float()
    observed = torch.cat([observed[is_common], observed[~is_common].sum()[None]])
    expected = torch.cat([expected[is_common], expected[~is_common].sum()[None]])
    freedom = len(expected) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    # Wilson and Hilferty's approximation of the 0.9999 quantile
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < limit


def test_top_k_and_top_p_keep_exactly_the_likeliest(engine: LocalInstance, directory: Path) -> None:
    prompt = prompts()[5]
    probabilities, order = tiny_models.logprobs(directory, prompt)[-1].exp().sort(descending=True)
    nucleus = order[: int((probabilities.cumsum(0) < 0.6).sum()) + 1]
    for changes, allowed in (({"top_k": 4}, order[:4]), ({"top_p": 0.6}, nucleus)):
        params = [seeded(seed=seed, max_tokens=1, **changes) for seed in range(1500)]
        drawn = {token for [token] in tokens(run(engine, [prompt] * len(params), params))}
        assert drawn <= set(allowed.tolist())
        assert len(drawn) >= min(len(allowed), 4)


@pytest.mark.parametrize("penalty", [1.4, 0.7])
def test_repetition_penalty_is_transformers(engine: LocalInstance, directory: Path, penalty: float) -> None:
    prompt = prompts()[4]
    ids = torch.tensor([prompt])
    expected = tiny_models.oracle(directory).generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=40,
        repetition_penalty=penalty,
    )
    assert tokens(run(engine, [prompt], greedy_params(40, repetition_penalty=penalty))) == [
        expected[0, len(prompt) :].tolist()
    ]


def test_presence_and_frequency_penalties_follow_their_formula(
    engine: LocalInstance, directory: Path
) -> None:
    prompt, produced = prompts()[4], list[int]()
    for _ in range(12):
        logits = tiny_models.logprobs(directory, prompt + produced)[-1].clone()
        for token in set(produced):
            logits[token] -= 0.4 + 0.9 * produced.count(token)
        produced.append(int(logits.argmax()))
    params = greedy_params(12, presence_penalty=0.4, frequency_penalty=0.9)
    assert tokens(run(engine, [prompt], params)) == [produced]


def test_only_allowed_tokens_come(engine: LocalInstance, directory: Path) -> None:
    prompt, produced, allowed = prompts()[4], list[int](), [3, 60, 61, 150]
    for _ in range(12):
        logits = tiny_models.logprobs(directory, prompt + produced)[-1]
        produced.append(max(allowed, key=lambda token: float(logits[token])))
    params = greedy_params(12, allowed_token_ids=allowed)
    assert tokens(run(engine, [prompt], params)) == [produced]
    drawn = tokens(run(engine, [prompt], seeded(allowed_token_ids=allowed, temperature=9.0)))
    assert {*drawn[0]} == {*allowed}


def test_a_bad_word_is_never_completed(engine: LocalInstance) -> None:
    prompt = prompts()[4]
    [free] = tokens(run(engine, [prompt], greedy_params(12)))
    # A word of one token, of two, and of three: each is what would have come.
    for length in (1, 2, 3):
        word = free[4 : 4 + length]
        [found] = tokens(run(engine, [prompt], greedy_params(12, bad_word_ids=[word])))
        first = next(place for place in range(12) if free[place : place + length] == word) + length - 1
        assert found[:first] == free[:first] and found[first] != free[first]
        assert not any(found[place : place + length] == word for place in range(12))
    # The prompt does not count: only the output must not have it.
    begun = greedy_params(1, bad_word_ids=[[prompt[-1], free[0]]])
    assert tokens(run(engine, [prompt], begun)) == [free[:1]]


def test_a_request_without_a_possible_token_ends_alone(engine: LocalInstance) -> None:
    impossible = greedy_params(5, allowed_token_ids=[7, 8], bad_word_ids=[[7], [8]])
    found, other = run(engine, [prompts()[2]] * 2, [impossible, greedy_params(5)])
    assert [event.finish_reason for event in found] == ["error"]
    assert str(found[0].error).startswith("allowed_token_ids: ")
    assert len(other) == 5


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts numbers that are read from tensors one by one. On a GPU each waits for all work before it."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


def test_whether_a_token_is_left_is_read_once_for_all_rows() -> None:
    impossible = greedy_params(5, allowed_token_ids=[7, 8], bad_word_ids=[[8], [7]])
    many = [impossible, impossible, greedy_params(5, bad_word_ids=[[7]]), impossible]
    requests = [
        Request(RequestId(str(number)), np.array([1]), params, 0, frozenset(), 5)
        for number, params in enumerate(many)
    ]
    with Waits() as waits:  # type: ignore[no-untyped-call]
        failed = _edit_all(torch.zeros(len(many), VOCAB_SIZE), Due(requests))
    assert waits.num == 0 and sorted(failed) == [0, 1, 3]


def test_logit_bias_decides(engine: LocalInstance) -> None:
    assert tokens(run(engine, [prompts()[2]], greedy_params(5, logit_bias={42: 100}))) == [[42] * 5]


def test_stop_tokens_end_and_min_tokens_hold_them_off(engine: LocalInstance, directory: Path) -> None:
    prompt, plain = prompts()[3], greedy(directory)[3]
    stop = plain[5]
    first = plain.index(stop)
    [events] = run(engine, [prompt], greedy_params(stop_token_ids=[stop]))
    assert tokens([events]) == [plain[: first + 1]]
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", stop)
    [events] = run(engine, [prompt], greedy_params(30, stop_token_ids=[stop], min_tokens=20))
    [produced] = tokens([events])
    assert stop not in produced[:20] and len(produced) >= 20


def test_an_end_token_outside_the_vocabulary_harms_no_one(tiny_model: Directory, tmp_path: Path) -> None:
    """Fine-tunes keep the generation_config.json of a model with more tokens."""
    directory = shutil.copytree(tiny_model(FAMILY), tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [VOCAB_SIZE, 2**70]}))
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=4)
    [produced] = tokens(run(make_instance(directory), [prompts()[3]], params))
    assert produced == greedy(tiny_model(FAMILY))[3][:8]


@pytest.fixture
def default_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("family", ["llama3-rope", "opt"])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_torchs_default_dtype_changes_nothing(
    tiny_model: Directory, family: str, backend: str, request: pytest.FixtureRequest
) -> None:
    """Scripts set it, for the models that they load with transformers."""
    directory = tiny_model(family)
    expected = tokens(run(make_instance(directory, attention_backend=backend), prompts(), mixed_params()))
    request.getfixturevalue("default_float64")
    other = make_instance(directory, attention_backend=backend)
    try:
        assert tokens(run(other, prompts(), mixed_params())) == expected
    finally:
        other.reset()


def test_length_ends_at_max_tokens_and_at_the_models_length(engine: LocalInstance) -> None:
    [events] = run(engine, [prompts()[1]], greedy_params(3))
    assert (len(events), events[-1].finish_reason) == (3, "length")
    rng = random.Random(1)
    long_prompt = [rng.randrange(VOCAB_SIZE) for _ in range(engine.engine.max_model_len - 5)]
    [events] = run(engine, [long_prompt], greedy_params(100))
    assert (len(events), events[-1].finish_reason) == (5, "length")


@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("family", ["llama-gqa-tied", "opt", "qwen3"])
def test_logprobs_are_transformers(tiny_model: Directory, family: str, backend: str) -> None:
    directory = tiny_model(family)
    engine = make_instance(directory, attention_backend=backend, max_prefill_chunk=30)
    params = greedy_params(20, logprobs=5, prompt_logprobs=3)
    for prompt, events in zip(prompts(), run(engine, prompts(), params), strict=True):
        [produced] = tokens([events])
        expected = tiny_models.logprobs(directory, prompt + produced)
        found = [position for event in events for position in event.prompt_logprobs or ()]
        assert [position.token_ids[0] for position in found] == prompt[1:]
        for position, row in zip(found, expected, strict=False):
            check_position(position, row, num_likeliest=3)
        rows = expected[len(prompt) - 1 :]
        for event, row in zip([event for event in events if event.logprobs], rows, strict=False):
            check_position(event.logprobs, row, num_likeliest=5)


def check_position(position: Any, row: torch.Tensor, num_likeliest: int) -> None:
    assert len(position.token_ids) == num_likeliest + 1
    assert torch.allclose(torch.tensor(position.logprobs), row[position.token_ids], atol=1e-4, rtol=0)
    assert torch.allclose(
        torch.tensor(position.logprobs[1:]), row.topk(num_likeliest).values, atol=1e-4, rtol=0
    )
    assert position.ranks[0] == int((row > row[position.token_ids[0]]).sum()) + 1
