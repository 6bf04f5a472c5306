"""KV in 8 bits in an instance's own cache: little is lost, and nothing that moves or splits work changes a token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve import LLM
from alignedserve.engine import build
from alignedserve.engine.config import EngineConfig
from alignedserve.kernels.kv_rows import from_rows
from alignedserve.types import BlockId
from tests.engine.helpers import EvictEveryStep, greedy_params, make_engine, make_instance, run, tokens
from tests.tiny_models import prompts

Directory = Callable[[str], Path]
FAMILIES = ["llama-gqa-tied", "mistral-window", "qwen3", "opt"]
both_dtypes = pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
both_backends = pytest.mark.parametrize("backend", ["torch", "cpu"])


def said(directory: Path, kv_cache_dtype: str, backend: str = "cpu", **options: Any) -> list[list[int]]:
    engine = make_instance(directory, attention_backend=backend, kv_cache_dtype=kv_cache_dtype, **options)
    return tokens(run(engine, prompts(), greedy_params()))


def logprobs(directory: Path, backend: str, kv_cache_dtype: str, **options: Any) -> torch.Tensor:
    """Of all prompts' tokens."""
    params = greedy_params(max_tokens=1, prompt_logprobs=0)
    engine = make_instance(directory, attention_backend=backend, kv_cache_dtype=kv_cache_dtype, **options)
    found = [
        each.logprobs[0]
        for outputs in run(engine, prompts(), params)
        for output in outputs
        for each in output.prompt_logprobs or ()
    ]
    return torch.tensor(found)


@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize(("kv_cache_dtype", "most"), [("fp8", 0.1), ("int8", 0.02)])
@pytest.mark.parametrize("family", FAMILIES)
def test_backends_differ_by_less_than_8_bits_do(
    tiny_model: Directory, family: str, kv_cache_dtype: str, most: float
) -> None:
    """Not by nothing: what differs in the last bit may be rounded to another code."""
    directory = tiny_model(family)
    exact, native, torch_ = (
        logprobs(directory, *each)
        for each in (("cpu", "auto"), ("cpu", kv_cache_dtype), ("torch", kv_cache_dtype))
    )
    error = (native - exact).abs().mean()
    assert 0 < error < most * exact.std()
    assert (native - torch_).abs().mean() < 0.1 * error


@both_dtypes
def test_a_chunk_attends_to_its_own_kv_as_it_is_kept(tiny_model: Directory, kv_cache_dtype: str) -> None:
    """In bfloat16, to the last bit, however a prompt is cut."""
    directory = tiny_model("llama-gqa-tied")
    whole, cut = (
        logprobs(directory, "cpu", kv_cache_dtype, dtype="bfloat16", **options)
        for options in ({}, {"max_prefill_chunk": 3})
    )
    assert torch.equal(whole, cut)


@pytest.mark.slow
@pytest.mark.drawn(one_in=8)
@pytest.mark.parametrize(
    "options",
    [
        {"max_prefill_chunk": 1},
        {"max_prefill_chunk": 7, "block_size": 8},
        {"max_num_batched_tokens": 50},
        {"max_num_seqs": 1, "block_size": 32},
        {"policy": EvictEveryStep, "max_prefill_chunk": 40},
    ],
    ids=str,
)
@both_dtypes
@both_backends
@pytest.mark.parametrize("family", ["llama-gqa-tied", "mistral-window"])
def test_chunks_blocks_batches_and_preemption_change_nothing(
    tiny_model: Directory, family: str, backend: str, kv_cache_dtype: str, options: dict[str, Any]
) -> None:
    directory = tiny_model(family)
    assert said(directory, kv_cache_dtype, backend, **options) == said(directory, kv_cache_dtype, backend)


@both_dtypes
def test_a_prompt_that_comes_again_finds_its_kv(tiny_model: Directory, kv_cache_dtype: str) -> None:
    llm = LLM(
        str(tiny_model("llama-gqa-tied")),
        skip_tokenizer_init=True,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory_bytes=64 << 20,
        use_tqdm=False,
    )
    first, again = (
        llm.generate({"prompt_token_ids": prompts()[8]}, greedy_params(), use_tqdm=False)[0] for _ in range(2)
    )
    assert first.num_cached_tokens == 0 and again.num_cached_tokens and again.num_cached_tokens > 200
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    llm.instance.close()


@both_dtypes
def test_a_cache_has_room_for_more_tokens(tiny_model: Directory, kv_cache_dtype: str) -> None:
    """Of a head of 16 values: 64 bytes in float32; 16, and 20 with a scale."""
    directory = tiny_model("llama-gqa-tied")
    options = {"kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 1000}
    whole, part = (
        make_engine(directory, kv_cache_dtype=each, **options) for each in ("auto", kv_cache_dtype)
    )
    row_bytes = {"fp8": 16, "int8": 20}[kv_cache_dtype]
    assert part.format.block_bytes == whole.format.block_bytes * row_bytes // 64
    assert part.cache.blocks[0].nbytes == part.format.block_bytes
    assert part.limits.num_blocks >= whole.limits.num_blocks * 64 // row_bytes


@both_dtypes
def test_blocks_are_filled_with_what_is_measured_with(tiny_model: Directory, kv_cache_dtype: str) -> None:
    cache = make_engine(tiny_model("qwen2"), kv_cache_dtype=kv_cache_dtype).cache
    values = torch.randn(*cache.format.shape[:-1], cache.format.head_dim)
    cache.fill([BlockId(3), BlockId(5)], values)
    for block in (3, 5):
        torch.testing.assert_close(from_rows(cache.blocks[block]), values, rtol=0.07, atol=0.02)


def test_what_does_not_go_together_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Directory
) -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype='fp4': must be one of auto, fp8, int8"):
        LLM("nowhere", kv_cache_dtype="fp4")
    with pytest.raises(ValueError, match="^hidden_cache=True and kv_cache_dtype='fp8': must be auto then"):
        EngineConfig("nowhere", kv_cache_dtype="fp8", hidden_cache=True)
    with pytest.raises(ValueError, match="^pool_kv_dtype='int8' and kv_cache_dtype='int8': one of them must"):
        LLM("nowhere", kv_cache_dtype="int8", pool_kv_dtype="int8")
    monkeypatch.setattr(build, "_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(
        ValueError, match=r"^kv_cache_dtype='fp8': needs a GPU of .* 8.9 or newer, this one has \(8, 0\)"
    ):
        make_engine(tiny_model("qwen2"), kv_cache_dtype="fp8")
