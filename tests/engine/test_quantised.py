"""Weights in eight bits, FP8 and four bits: little is lost, and nothing that moves or splits work changes a token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.engine import build
from alignedserve.engine.config import QUANTIZATIONS, EngineConfig
from alignedserve.engine.request import NewRequest
from alignedserve.kv.held import Held
from alignedserve.kv.layout import INPUTS, PLAIN
from alignedserve.models.hf_config import load_model_config
from alignedserve.models.listed_weights import num_weight_bytes
from alignedserve.types import RequestId
from tests.engine.helpers import (
    EvictEveryStep,
    greedy_params,
    make_direct,
    make_engine,
    make_instance,
    run,
    tokens,
)
from tests.tiny_models import prompts

Directory = Callable[[str], Path]
FAMILIES = [
    "llama-gqa-tied",
    "mistral-window",
    "qwen2",
    "qwen3",
    "phi3-partial-window",
    "gemma3",
    "opt",
    "opt-post-norm",
    "qwen3-moe",
    "mixtral",
    "gpt-oss",
]


def said(directory: Path, scheme: str, backend: str = "cpu", **options: Any) -> list[list[int]]:
    engine = make_instance(directory, attention_backend=backend, quantization=scheme, **options)
    return tokens(run(engine, prompts(), greedy_params()))


def logprobs(directory: Path, backend: str, quantization: str | None, **options: Any) -> torch.Tensor:
    """Of all prompts' tokens."""
    params = greedy_params(max_tokens=1, prompt_logprobs=0)
    engine = make_instance(directory, attention_backend=backend, quantization=quantization, **options)
    found = [
        each.logprobs[0]
        for outputs in run(engine, prompts(), params)
        for output in outputs
        for each in output.prompt_logprobs or ()
    ]
    return torch.tensor(found)


@pytest.mark.drawn(one_in=8)
@pytest.mark.parametrize(("scheme", "most"), [("int8", 0.1), ("fp8", 0.2), ("int4", 0.6)])
@pytest.mark.parametrize("family", FAMILIES)
def test_backends_differ_by_less_than_fewer_bits_do(
    tiny_model: Directory, family: str, scheme: str, most: float
) -> None:
    """Not by nothing: what differs in the last bit may be rounded to another code."""
    directory = tiny_model(family)
    exact, native, torch_ = (
        logprobs(directory, *each) for each in (("cpu", None), ("cpu", scheme), ("torch", scheme))
    )
    error = (native - exact).abs().mean()
    assert 0 < error < most * exact.std()
    assert (native - torch_).abs().mean() < 0.5 * error


@pytest.mark.slow
@pytest.mark.drawn(one_in=8)
@pytest.mark.parametrize(
    "options",
    [
        {"max_prefill_chunk": 7, "block_size": 8},
        {"max_num_batched_tokens": 50},
        {"max_num_seqs": 1},
        {"policy": EvictEveryStep, "max_prefill_chunk": 40},
    ],
    ids=str,
)
@pytest.mark.parametrize("scheme", QUANTIZATIONS)
@pytest.mark.parametrize("family", ["llama-gqa-tied", "opt", "qwen3-moe"])
def test_chunks_batches_and_preemption_change_nothing(
    tiny_model: Directory, family: str, scheme: str, options: dict[str, Any]
) -> None:
    assert said(tiny_model(family), scheme, **options) == said(tiny_model(family), scheme)


@pytest.mark.parametrize("scheme", QUANTIZATIONS)
@pytest.mark.parametrize("backend", [pytest.param("torch", marks=pytest.mark.slow), "cpu"])
def test_what_is_kept_in_place_of_kv_is_projected_by_the_same_weights(
    tiny_model: Directory, backend: str, scheme: str
) -> None:
    directory = tiny_model("opt")
    engine = make_direct(directory, attention_backend=backend, hidden_cache=True, quantization=scheme)
    requests = []
    for index, prompt in enumerate(prompts()):
        held = Held(layout=INPUTS if index % 2 == 0 else PLAIN)
        requests.append(
            engine.begin(NewRequest(RequestId(str(index)), prompt, greedy_params(), 0, held=held))
        )
    expected = said(directory, scheme, backend)
    while running := [each for each in requests if len(each.output) < len(expected[0])]:
        engine.execute([(each, min(each.num_pending, 9)) for each in running])
    # In plain torch a token may depend on what is computed beside it.
    num_same = len(expected[0]) if backend == "cpu" else 1
    assert [each.output[:num_same] for each in requests] == [each[:num_same] for each in expected]


def test_linear_layers_alone_have_fewer_bits_and_doctor_counts_them_so(tiny_model: Directory) -> None:
    for family in ("llama-gqa-tied", "qwen2", "mixtral"):
        config = load_model_config(tiny_model(family))
        whole = num_weight_bytes(config, torch.float32, None)
        int8, int4, fp8 = (num_weight_bytes(config, torch.float32, None, each) for each in QUANTIZATIONS)
        assert int8 == fp8
        table = 4 * config.vocab_size * config.hidden_size
        # Tied embeddings are there twice.
        assert table < int4 < int8 < whole / 4 + table + 40_000


def test_what_does_not_run_so_is_refused_by_name(
    tiny_model: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="quantization='int3': must be one of int8, int4, fp8"):
        EngineConfig("x", quantization="int3")
    monkeypatch.setattr(build, "_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(
        ValueError,
        match=r"quantization='fp8': needs a GPU of compute capability 8.9 or newer, this one has \(8, 6\)",
    ):
        make_engine(tiny_model("qwen2"), quantization="fp8")
