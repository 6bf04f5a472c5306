"""Adapters that are loaded into a running engine: tokens are those of an engine that was started with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignedserve.engine.adapter_places import AdapterPlaces
from alignedserve.engine.config import EngineConfig
from alignedserve.offline.local_instance import LocalInstance
from alignedserve.types import InvalidRequest
from tests.engine.helpers import greedy_params, make_instance, run, tokens
from tests.tiny_adapters import write_adapter
from tests.tiny_models import prompts

Directory = Callable[[str], Path]
BACKENDS = ["torch", "cpu"]
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"seed": 1},
    "small": {"seed": 2, "r": 3, "targets": ("q_proj", "v_proj", "qkv_proj"), "use_rslora": True},
    "wide": {"seed": 3, "r": 16},
}


def said(instance: LocalInstance, adapter: str) -> list[list[int]]:
    return tokens(run(instance, prompts(), greedy_params(), [adapter] * len(prompts())))


def places(instance: LocalInstance) -> AdapterPlaces:
    found = instance.engine.adapter_places
    assert found is not None
    return found


def load(instance: LocalInstance, name: str, path: Path) -> None:
    places(instance).set(name, places(instance).write(name, path))


@pytest.fixture
def paths(tiny_model: Directory, tmp_path: Path) -> dict[str, Path]:
    model = tiny_model("llama-gqa-tied")
    return {name: write_adapter(tmp_path / name, model, **settings) for name, settings in SETTINGS.items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["llama-gqa-tied", "phi3-partial-window"])
def test_tokens_are_those_of_an_engine_that_was_started_with_the_adapter(
    name: str, backend: str, tiny_model: Directory, tmp_path: Path
) -> None:
    model = tiny_model(name)
    found = {each: write_adapter(tmp_path / each, model, **settings) for each, settings in SETTINGS.items()}
    running = make_instance(model, attention_backend=backend, max_loras=2)
    plain = said(running, "")
    assert plain == said(make_instance(model, attention_backend=backend), "")
    for each, path in found.items():
        load(running, each, path)
        started = make_instance(model, attention_backend=backend, lora_modules=(f"{each}={path}",))
        assert said(running, each) == said(started, each) != plain
    # The others are as they were.
    assert said(running, "") == plain and said(running, "all") != said(running, "small")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_place_holds_another_adapter_after_the_first_is_removed(
    backend: str, tiny_model: Directory, paths: dict[str, Path]
) -> None:
    model = tiny_model("llama-gqa-tied")
    running = make_instance(
        model, attention_backend=backend, max_loras=1, lora_modules=(f"all={paths['all']}",)
    )
    before = said(running, "all")
    # The second place is the one that is kept for a replacement.
    load(running, "wide", paths["wide"])
    with pytest.raises(InvalidRequest, match="all 2 places for adapters are taken"):
        load(running, "small", paths["small"])
    places(running).remove("wide")
    load(running, "small", paths["small"])
    started = make_instance(model, attention_backend=backend, lora_modules=(f"small={paths['small']}",))
    assert said(running, "small") == said(started, "small") and said(running, "all") == before
    with pytest.raises(InvalidRequest, match="not loaded"):
        said(running, "wide")


def test_an_adapter_that_does_not_fit_changes_nothing(
    tiny_model: Directory, paths: dict[str, Path], tmp_path: Path
) -> None:
    model = tiny_model("llama-gqa-tied")
    running = make_instance(
        model, attention_backend="torch", max_loras=2, lora_modules=(f"all={paths['all']}",)
    )
    before = said(running, "all"), said(running, "")
    other = write_adapter(tmp_path / "other", tiny_model("phi3-partial-window"), seed=1)
    high = write_adapter(tmp_path / "high", model, seed=1, r=17)
    broken = write_adapter(tmp_path / "broken", model, seed=1)
    (broken / "adapter_model.safetensors").write_bytes(b"\x00" * 100)
    for path, reason in ((other, "shape|does not have"), (high, "max_lora_rank=16"), (broken, "")):
        with pytest.raises(InvalidRequest, match=reason):
            load(running, "new", path)
    with pytest.raises(InvalidRequest, match="not a directory"):
        load(running, "new", tmp_path / "none")
    assert (said(running, "all"), said(running, "")) == before
    assert list(places(running).numbers) == ["all"]


def test_settings_that_can_not_reserve_places() -> None:
    with pytest.raises(ValueError, match="max_loras=65: must be from 0 to 64"):
        EngineConfig("model", max_loras=65)
    with pytest.raises(ValueError, match="loads adapters only when it starts"):
        EngineConfig("model", max_loras=1, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="hidden_cache"):
        EngineConfig("model", max_loras=1, hidden_cache=True)
