"""Embeddings equal those that transformers' last hidden states yield, whatever splits, moves or repeats the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from alignedserve.engine.outputs import TokenOutput
from alignedserve.offline.local_instance import LocalInstance
from alignedserve.protocol.pooling import DTYPE, NO_SAMPLING, POOLINGS
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import InvalidRequest, RequestId
from tests.engine.helpers import greedy_params, make_engine, make_instance
from tests.tiny_models import VOCAB_SIZE, embeddings, greedy, prompts

Directory = Callable[[str], Path]
FAMILIES = ["llama-gqa-tied", "qwen3", "opt", "opt-post-norm"]

both_poolings = pytest.mark.parametrize("pooling", POOLINGS)


def run(
    instance: LocalInstance, all_prompts: Sequence[list[int]], params: Sequence[SamplingParams | str]
) -> dict[str, list[TokenOutput]]:
    """The outputs of each request: of one that generates, or of one for an embedding, of which the pooling is given."""
    outputs: dict[str, list[TokenOutput]] = {}
    for index, (prompt, wanted) in enumerate(zip(all_prompts, params, strict=True)):
        outputs[f"r{index}"] = []
        sampling = NO_SAMPLING if isinstance(wanted, str) else wanted
        pooling = wanted if isinstance(wanted, str) else None
        instance.add_request(RequestId(f"r{index}"), prompt, sampling, 0, pooling=pooling)
    while instance.num_unfinished:
        for event in instance.step():
            outputs[event.request_id].append(event)
    instance.check_idle()
    return outputs


def found(outputs: Sequence[TokenOutput]) -> np.ndarray[Any, Any]:
    """Of a request for an embedding: it has that one output, and no token."""
    assert [(each.token_id, each.finish_reason) for each in outputs] == [(None, "stop")]
    return np.frombuffer(outputs[0].embedding, DTYPE)


def embed(instance: LocalInstance, all_prompts: Sequence[list[int]], pooling: str) -> np.ndarray[Any, Any]:
    outputs = run(instance, all_prompts, [pooling] * len(all_prompts))
    return np.stack([found(each) for each in outputs.values()])


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
@both_poolings
def test_every_family_matches_transformers(
    tiny_model: Directory, family: str, backend: str, pooling: str
) -> None:
    instance = make_instance(tiny_model(family), attention_backend=backend)
    np.testing.assert_allclose(
        embed(instance, prompts(), pooling), embeddings(tiny_model(family), pooling), atol=2e-5
    )


@pytest.mark.parametrize(
    "options",
    [{"max_prefill_chunk": 7, "block_size": 8}, {"max_num_batched_tokens": 50}, {"max_num_seqs": 2}],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama-gqa-tied", "opt"])
@both_poolings
def test_chunks_blocks_and_batches_change_nothing(
    tiny_model: Directory, family: str, options: dict[str, Any], pooling: str
) -> None:
    instance = make_instance(tiny_model(family), **options)
    np.testing.assert_allclose(
        embed(instance, prompts(), pooling), embeddings(tiny_model(family), pooling), atol=2e-5
    )


@both_poolings
def test_preempted_for_answers_they_are_computed_again(tiny_model: Directory, pooling: str) -> None:
    """There is room for the longest prompt alone. What leaves has its KV moved, but for an embedding dropped."""
    directory = tiny_model("llama-gqa-tied")
    block_bytes = 3 * 2 * 16 * 2 * 16 * 4
    num_blocks = 25
    instance = make_instance(
        directory,
        kv_cache_memory_bytes=block_bytes * num_blocks,
        max_model_len=16 * num_blocks,
        max_prefill_chunk=4,
        enable_prefix_caching=False,
    )
    answers, embedded = prompts()[3:7], prompts()[4:]
    wanted: list[SamplingParams | str] = [*[greedy_params()] * len(answers), *[pooling] * len(embedded)]
    outputs = [*run(instance, [*answers, *embedded], wanted).values()]
    tokens = [[event.token_id for event in each] for each in outputs[: len(answers)]]
    assert tokens == greedy(directory)[3:7]
    vectors = np.stack([found(each) for each in outputs[len(answers) :]])
    np.testing.assert_allclose(vectors, embeddings(directory, pooling)[4:], atol=2e-5)
    assert instance.num_drops > 0


@both_poolings
def test_a_prefix_that_is_there_changes_nothing(tiny_model: Directory, pooling: str) -> None:
    """The last state needs no more than the last token computed; a mean needs all."""
    directory = tiny_model("llama-gqa-tied")
    instance = make_instance(directory)
    prompt = prompts()[-1]
    first = embed(instance, [prompt], pooling)
    request = instance.add_request(RequestId("again"), prompt, NO_SAMPLING, 0, pooling=pooling)
    [again] = [event for _ in range(50) for event in instance.step()]
    np.testing.assert_allclose(found([again])[None], first, atol=2e-5)
    assert (request.num_found > 0) is (pooling == "last")


@both_poolings
def test_a_prompt_as_long_as_the_model_allows(tiny_model: Directory, pooling: str) -> None:
    directory = tiny_model("llama-gqa-tied")
    instance = make_instance(directory, max_model_len=64)
    dice = Random(1)
    prompt = [dice.randrange(VOCAB_SIZE) for _ in range(64)]
    vector = embed(instance, [prompt], pooling)[0]
    np.testing.assert_allclose(vector, embeddings(directory, pooling, (tuple(prompt),))[0], atol=2e-5)
    with pytest.raises(InvalidRequest, match="65 tokens; at most 64"):
        instance.add_request(RequestId("long"), [*prompt, 1], NO_SAMPLING, 0, pooling=pooling)


def test_a_broken_state_is_an_error_of_that_request_alone(tiny_model: Directory) -> None:
    engine = make_engine(tiny_model("llama-gqa-tied"))
    model: Any = engine._runner._model
    right = model.final_states
    broken = iter([True, False, False])
    model.final_states = lambda rows: right(rows) * (float("nan") if next(broken) else 1.0)
    outputs = run(LocalInstance(engine), prompts()[:3], ["last"] * 3)
    assert [each[0].finish_reason for each in outputs.values()] == ["error", "stop", "stop"]


def test_an_unknown_pooling_is_refused(tiny_model: Directory) -> None:
    instance = make_instance(tiny_model("llama-gqa-tied"))
    with pytest.raises(InvalidRequest, match="pooling='first': must be one of last, mean"):
        instance.add_request(RequestId("r"), [1], NO_SAMPLING, 0, pooling="first")


def test_vectors_have_length_one(tiny_model: Directory) -> None:
    vectors = torch.tensor(embed(make_instance(tiny_model("opt")), prompts(), "mean"))
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(vectors)))
