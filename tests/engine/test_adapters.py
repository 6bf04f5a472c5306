"""Adapters: the tokens are those of transformers with the adapter merged into the weights, whatever runs beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alignedserve.engine.config import EngineConfig
from alignedserve.engine.engine import Engine
from alignedserve.offline.local_instance import LocalInstance
from alignedserve.types import InvalidRequest, RequestId
from tests.engine.helpers import EvictEveryStep, greedy_params, make_engine, make_instance, run, tokens
from tests.quantised_checkpoints import FORMATS, build
from tests.tiny_adapters import ATTENTION, MLP, merge, write_adapter
from tests.tiny_models import CONFIGS, embeddings, greedy, prompts

Directory = Callable[[str], Path]
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"seed": 1},
    "small": {
        "seed": 2,
        "r": 3,
        "targets": ("q_proj", "v_proj", "qkv_proj"),
        "lora_alpha": 8,
        "use_rslora": True,
    },
    "wide": {"seed": 3, "r": 16, "targets": (*MLP, "o_proj", "out_proj")},
}
NAMES = tuple(SETTINGS)
MIXTURES = ("qwen3-moe", "mixtral", "gpt-oss")
# With longrope transformers' tokens are others where prompts are short: see test_exact.py.
DENSE = [name for name in CONFIGS if not name.startswith((*MIXTURES, "phi3-longrope", "fading-sum"))]
BACKENDS = ["torch", "cpu"]
# One of each set of names of linear layers runs each time, beside Llama.
ALWAYS = ("phi3-partial-window", "gemma3", "opt")
# That of test_ranks.py.
in_turn = pytest.mark.drawn(one_in=8, turn=6)


class Family:
    """A model, its adapters, and what transformers says of each."""

    def __init__(self, name: str, model: Path, directory: Path) -> None:
        self.model = model
        self.paths, self.merged = {}, {"": model}
        for adapter, settings in SETTINGS.items():
            own = dict(settings, targets=ATTENTION) if name in MIXTURES else settings
            self.paths[adapter] = write_adapter(directory / adapter, model, **own)
            self.merged[adapter] = merge(directory / f"{adapter}-merged", model, self.paths[adapter])

    @property
    def options(self) -> dict[str, Any]:
        return {"lora_modules": tuple(f"{name}={path}" for name, path in self.paths.items())}

    def expected(self, adapters: Sequence[str]) -> list[list[int]]:
        """Of `prompts()`, each with its adapter."""
        return [greedy(self.merged[adapter])[index] for index, adapter in enumerate(adapters)]


@pytest.fixture(scope="module")
def family(tiny_model: Directory, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    return cache(lambda name: Family(name, tiny_model(name), tmp_path_factory.mktemp("adapters")))


# Of `prompts()`: a mixed batch.
MIXED = [("", *NAMES)[index % 4] for index in range(len(prompts()))]


def said(instance: LocalInstance | Engine, adapters: Sequence[str]) -> list[list[int]]:
    """What is generated for `prompts()`, each with its adapter."""
    return tokens(run(instance, prompts(), greedy_params(), adapters))


@pytest.mark.parametrize("name", ["llama-gqa-tied", pytest.param("opt", marks=pytest.mark.slow)])
def test_adapters_matter(family: Callable[[str], Family], name: str) -> None:
    each = [greedy(path) for path in family(name).merged.values()]
    for index in range(len(prompts())):
        assert len({tuple(answers[index]) for answers in each}) == len(each)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name",
    [
        "llama-gqa-tied",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ALWAYS),
        *(
            pytest.param(name, marks=[pytest.mark.slow, pytest.mark.drawn(one_in=6)])
            for name in DENSE
            if name not in ("llama-gqa-tied", *ALWAYS)
        ),
    ],
)
def test_every_family_matches_transformers(family: Callable[[str], Family], name: str, backend: str) -> None:
    found = family(name)
    engine = make_engine(found.model, attention_backend=backend, **found.options)
    for adapters in (MIXED, [*MIXED[1:], ""]):
        assert said(engine, adapters) == found.expected(adapters)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "backend", "options"),
    [
        ("llama-gqa-tied", 2, "cpu", {"max_prefill_chunk": 7, "policy": EvictEveryStep}),
        pytest.param("opt", 4, "cpu", {}, marks=in_turn),
        pytest.param("qwen2", 2, "torch", {}, marks=in_turn),
        # Its q, k and v are one tensor of the checkpoint, and of an adapter.
        pytest.param("phi3-partial-window", 2, "cpu", {}, marks=in_turn),
    ],
)
def test_ranks_have_their_parts_of_adapters(
    family: Callable[[str], Family], name: str, size: int, backend: str, options: dict[str, Any]
) -> None:
    found, some = family(name), slice(2, 6)
    divided = make_instance(
        found.model, tensor_parallel_size=size, attention_backend=backend, **options, **found.options
    )
    answers = tokens(run(divided, prompts()[some], greedy_params(8), MIXED[some]))
    assert answers == [each[:8] for each in found.expected(MIXED)[some]]


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_attention_of_mixtures_can_be_adapted(family: Callable[[str], Family], name: str) -> None:
    found = family(name)
    assert said(make_engine(found.model, **found.options), MIXED) == found.expected(MIXED)


@pytest.mark.slow
@pytest.mark.drawn(one_in=4)
@pytest.mark.parametrize(
    "options",
    [
        {"max_prefill_chunk": 1},
        {"max_prefill_chunk": 7, "block_size": 8},
        {"max_num_batched_tokens": 50},
        {"max_num_seqs": 2},
        {"policy": EvictEveryStep, "max_prefill_chunk": 40},
        {"quantization": "int8", "max_prefill_chunk": 7},
        {"quantization": "int4", "policy": EvictEveryStep, "max_prefill_chunk": 40},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama-gqa-tied", "opt"])
def test_chunks_batches_and_preemption_change_nothing(
    family: Callable[[str], Family], name: str, options: dict[str, Any]
) -> None:
    found = family(name)
    expected = found.expected(MIXED)
    if "quantization" in options:
        exact = expected
        expected = said(
            make_engine(found.model, quantization=options["quantization"], **found.options), MIXED
        )
        assert expected != exact
    assert said(make_instance(found.model, **options, **found.options), MIXED) == expected


def test_quantised_checkpoints_can_have_them(tmp_path: Path) -> None:
    """Rows of FP8 layers are as they are, so what the merged weights yield in float32 is known."""
    coded, plain = build("llama", FORMATS["fp8-block"], tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", plain, 1)
    expected = greedy(merge(tmp_path / "merged", plain, adapter))
    engine = make_engine(coded, dtype="float32", lora_modules=(f"mine={adapter}",))
    assert said(engine, ["mine"] * 9) == expected
    assert said(engine, [""] * 9) == greedy(plain) != expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_without_one_get_the_very_numbers_of_an_engine_without_any(
    family: Callable[[str], Family], backend: str
) -> None:
    found = family("llama-gqa-tied")
    params = greedy_params(20, logprobs=2, prompt_logprobs=1)
    engine = make_engine(found.model, attention_backend=backend, **found.options)
    plain = run(make_engine(found.model, attention_backend=backend), prompts(), params)
    assert run(engine, prompts(), params) == plain
    if backend == "cpu":
        # In plain torch a row may depend on what is computed beside it.
        mixed = run(engine, prompts(), params, MIXED)
        assert all(mixed[i] == plain[i] for i, name in enumerate(MIXED) if not name)


def test_kv_of_one_adapter_is_not_shared_with_another(family: Callable[[str], Family]) -> None:
    found = family("llama-gqa-tied")
    instance = make_instance(found.model, **found.options)
    longest = prompts()[-1]
    for adapter in ("", *NAMES, "", *NAMES):
        answer = tokens(run(instance, [longest], greedy_params(), [adapter]))
        assert answer == [greedy(found.merged[adapter])[-1]]
    counts = []
    for adapter in ("small", "", "all", "wide"):
        request = instance.add_request(RequestId("again"), longest, greedy_params(1), 0, adapter=adapter)
        while instance.num_unfinished:
            instance.step()
        counts.append(request.num_found)
    # Each finds its own.
    assert counts == [288] * 4
    instance.check_idle()


@pytest.mark.slow
def test_equal_prompts_of_several_adapters_at_once(family: Callable[[str], Family]) -> None:
    """They begin alike, and none waits for the KV of another adapter's."""
    found, longest = family("llama-gqa-tied"), prompts()[-1]
    instance = make_instance(found.model, max_num_batched_tokens=64, **found.options)
    adapters = ["", *NAMES] * 3
    expected = [greedy(found.merged[adapter])[-1] for adapter in adapters]
    assert tokens(run(instance, [longest] * 12, greedy_params(), adapters)) == expected


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings(family: Callable[[str], Family], pooling: str) -> None:
    found = family("llama-gqa-tied")
    instance = make_instance(found.model, max_prefill_chunk=40, **found.options)
    outputs = run(instance, prompts(), greedy_params(1), MIXED, pooling)
    vectors = [np.frombuffer(events[-1].embedding, dtype="<f4") for events in outputs]
    expected = [embeddings(found.merged[adapter], pooling)[i] for i, adapter in enumerate(MIXED)]
    assert np.allclose(vectors, expected, atol=1e-4)
    assert not np.allclose(vectors, embeddings(found.model, pooling), atol=1e-2)


@pytest.mark.slow
def test_bfloat16_is_as_near_as_the_merged_model_is(family: Callable[[str], Family]) -> None:
    found = family("llama-gqa-tied")

    def logprobs(directory: Path, adapter: str, dtype: str, **options: Any) -> torch.Tensor:
        engine = make_engine(directory, dtype=dtype, **options)
        outputs = run(engine, prompts()[-1:], greedy_params(1, prompt_logprobs=0), [adapter])
        return torch.tensor(
            [each.logprobs[0] for event in outputs[0] for each in event.prompt_logprobs or ()]
        )

    for name in NAMES:
        exact = logprobs(found.merged[name], "", "float32")
        merged = (logprobs(found.merged[name], "", "bfloat16") - exact).abs().mean()
        apart = (logprobs(found.model, name, "bfloat16", **found.options) - exact).abs().mean()
        assert 0 < apart < 1.5 * merged


def test_unknown_ones_and_what_does_not_go_together_are_refused_by_name(
    family: Callable[[str], Family],
) -> None:
    found = family("opt")
    instance = make_instance(found.model, **found.options)
    with pytest.raises(InvalidRequest, match="adapter='x': not loaded; loaded are all, small, wide"):
        instance.add_request(RequestId("1"), [1], greedy_params(), 0, adapter="x")
    with pytest.raises(InvalidRequest, match="adapter='x': not loaded; loaded are none"):
        make_instance(found.model).add_request(RequestId("1"), [1], greedy_params(), 0, adapter="x")
    with pytest.raises(
        ValueError, match="hidden_cache: restores K and V without adapters, but lora_modules has a, b"
    ):
        EngineConfig("x", hidden_cache=True, lora_modules=("a=b", "b=c"))
    with pytest.raises(ValueError, match="small: its rank r is 3; must be at most max_lora_rank=2"):
        make_engine(found.model, lora_modules=(f"small={found.paths['small']}",), max_lora_rank=2)
