"""Callers' mistakes are named in errors and affect no other request; NaN in one request only ends that one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.engine.outputs import BrokenLogits
from alignedserve.offline.local_instance import LocalInstance
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import InvalidRequest, RequestId
from tests.engine.helpers import greedy_params, make_instance, run, tokens
from tests.tiny_models import MAX_LEN, VOCAB_SIZE, greedy, prompts


@pytest.fixture(scope="module")
def directory(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama-gqa-tied")


@pytest.fixture(scope="module")
def engine(directory: Path) -> LocalInstance:
    return make_instance(directory)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], ["prompt", "empty"]),
        ([1] * MAX_LEN, ["prompt", str(MAX_LEN), "max_model_len"]),
        ([1, -1], ["prompt_token_ids", "-1", f"0 to {VOCAB_SIZE - 1}"]),
        ([VOCAB_SIZE], ["prompt_token_ids", str(VOCAB_SIZE)]),
        ([2**31], ["prompt_token_ids", str(2**31)]),
        ([2**63], ["prompt_token_ids"]),
        ([2**70], ["prompt_token_ids"]),
        ([1.5], ["prompt_token_ids", "integers"]),
        (["a"], ["prompt_token_ids", "integers"]),
        ([[1, 2]], ["prompt_token_ids", "integers"]),
        ([True], ["prompt_token_ids", "integers"]),
    ],
)
def test_bad_prompts_are_named_and_leave_nothing(
    engine: LocalInstance, prompt: Any, words: list[str]
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        engine.add_request(RequestId("bad"), prompt, greedy_params(), 0)
    for word in words:
        assert word in str(raised.value)
    assert engine.num_unfinished == 0
    engine.check_idle()


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": [VOCAB_SIZE]},
        {"logit_bias": {VOCAB_SIZE: 1.0}},
        {"allowed_token_ids": [VOCAB_SIZE]},
        {"bad_word_ids": [[0, VOCAB_SIZE]]},
    ],
)
def test_ids_in_parameters_are_held_against_the_vocabulary(
    engine: LocalInstance, params: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match=str(VOCAB_SIZE)):
        engine.add_request(RequestId("bad"), [1], SamplingParams(**params), 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 10**9),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 1000),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {"x": 0.0}),
        ("logit_bias", {1: math.inf}),
        ("stop_token_ids", [-1]),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", 5),
        ("bad_words", [" "]),
        ("bad_words", [5]),
        ("bad_word_ids", [[]]),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 5),
        ("stop_token_ids", 0),
        ("logit_bias", [1]),
        ("ignore_eos", "false"),
    ],
)
def test_parameters_out_of_range_are_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**{name: value})
    assert name in str(raised.value)


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens=9.*max_tokens=8"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_a_kv_budget_too_small_for_one_request(directory: Path) -> None:
    with pytest.raises(
        ValueError, match=r"kv_cache_memory_bytes=10000: 0 blocks.*max_model_len=512.*needs 32"
    ):
        make_instance(directory, kv_cache_memory_bytes=10000)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": MAX_LEN + 1}, f"max_model_len={MAX_LEN + 1}.*{MAX_LEN}"),
        ({"max_model_len": 0}, "max_model_len=0.*at least 1"),
        ({"dtype": "int8"}, "dtype='int8'.*float32"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"device": "cuda:0"}, "cuda:0"),
        ({"attention_backend": "magic"}, "attention_backend='magic'.*torch"),
        ({"block_size": -1}, "block_size=-1"),
        ({"load_format": "pickle"}, "load_format='pickle'"),
    ],
)
def test_bad_options_are_named(directory: Path, options: dict[str, Any], words: str) -> None:
    if options.get("device") == "cuda:0" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(ValueError, match=words):
        make_instance(directory, **options)


def test_the_same_id_twice(engine: LocalInstance) -> None:
    engine.add_request(RequestId("twice"), [1], greedy_params(1), 0)
    with pytest.raises(ValueError, match="twice"):
        engine.add_request(RequestId("twice"), [1], greedy_params(1), 0)
    assert engine.abort(RequestId("twice"))
    assert not engine.abort(RequestId("twice"))
    engine.check_idle()


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_nan_ends_its_request_and_no_other(directory: Path, backend: str) -> None:
    """A NaN in the KV of one request; then its blocks, NaN and all, are used by others."""
    engine = make_instance(
        directory, attention_backend=backend, kv_cache_memory_bytes=1 << 20, enable_prefix_caching=False
    )
    poisoned, healthy = RequestId("poisoned"), RequestId("healthy")
    engine.add_request(healthy, prompts()[4], greedy_params(20), 0)
    added = engine.add_request(poisoned, prompts()[6], greedy_params(20), 0)
    events = engine.step()
    block = engine._worker.schedule.blocks[added.key].blocks[0]
    engine.engine.cache.blocks[block] = math.nan
    while engine.num_unfinished:
        events += engine.step()
    mine = [event for event in events if event.request_id == poisoned]
    assert [event.finish_reason for event in mine] == [None, "error"]
    assert isinstance(mine[-1].error, BrokenLogits)
    produced = [event.token_id for event in events if event.request_id == healthy]
    assert produced == greedy(directory)[4][:20]
    engine.check_idle()
    engine.engine.cache.blocks.fill_(math.nan)
    assert tokens(run(engine, prompts(), greedy_params())) == greedy(directory)


def test_abort_in_every_state_frees_everything(directory: Path) -> None:
    engine = make_instance(directory, max_num_seqs=3, max_prefill_chunk=50, kv_cache_memory_bytes=1 << 19)
    for num_steps in range(0, 12, 2):
        for index in range(6):
            engine.add_request(RequestId(str(index)), prompts()[-1 - index % 3], greedy_params(200), 0)
        for _ in range(num_steps):
            engine.step()
        for index in range(6):
            assert engine.abort(RequestId(str(index)))
        engine.check_idle()
