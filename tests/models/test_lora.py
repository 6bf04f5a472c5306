"""What peft writes is read; what changes more than linear layers by a product, or is another model's, is refused by
name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from alignedserve.models.hf_config import load_model_config
from alignedserve.models.listed_weights import check_adapters, num_weight_bytes
from alignedserve.models.lora import load_lora_config, other_bases
from tests.tiny_adapters import ATTENTION, write_adapter

Directory = Callable[[str], Path]
# What peft 0.21 writes into adapter_config.json beside what says how the adapter is computed.
PEFT: dict[str, Any] = {
    **dict.fromkeys(
        [
            *("alora_invocation_tokens", "arrow_config", "auto_mapping", "corda_config", "eva_config"),
            *("exclude_modules", "kasa_config", "layer_replication", "layers_pattern", "layers_to_transform"),
            *("lora_ga_config", "megatron_config", "modules_to_save", "monteclora_config", "revision"),
            *("target_parameters", "trainable_token_indices", "use_bdlora", "velora_config"),
        ]
    ),
    **{"alpha_pattern": {}, "rank_pattern": {}, "loftq_config": {}, "megatron_core": "megatron.core"},
    **dict.fromkeys(["ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_dora", "use_qalora"], False),
    **{"inference_mode": True, "init_lora_weights": True, "lora_dropout": 0.05, "qalora_group_size": 16},
    **{"peft_version": "0.21.2", "task_type": "CAUSAL_LM"},
}


def check(model: Path, adapter: Path, max_rank: int = 16) -> None:
    check_adapters(load_model_config(model), [("mine", str(adapter))], max_rank)


@pytest.mark.parametrize(
    ("changed", "scale"),
    [
        ({}, 2.0),
        ({"lora_alpha": 4}, 0.5),
        ({"lora_alpha": 4, "r": 16, "use_rslora": True}, 1.0),
        ({"bias": None, "lora_alpha": 2.4, "use_rslora": None}, 0.3),
    ],
)
def test_what_peft_writes_is_read(
    tiny_model: Directory, tmp_path: Path, changed: dict[str, Any], scale: float
) -> None:
    adapter = write_adapter(tmp_path, tiny_model("qwen2"), 1, **PEFT | changed)
    check(tiny_model("qwen2"), adapter)
    found = load_lora_config(adapter)
    assert found.rank == changed.get("r", 8) and found.scale == pytest.approx(scale)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"peft_type": "IA3"}, r"peft_type is 'IA3'; must be 'LORA'"),
        ({"use_dora": True}, r"use_dora is True; must be false: DoRA scales weights as well"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]; must be absent"),
        ({"bias": "all"}, r"bias is 'all'; must be 'none': biases are not supported"),
        (
            {"rank_pattern": {"q_proj": 4}},
            r"rank_pattern is .*; must be absent: all layers have the same rank",
        ),
        ({"alpha_pattern": {"q_proj": 4}}, r"alpha_pattern is .*; must be absent"),
        ({"target_parameters": ["experts"]}, r"target_parameters is .*: experts' weights are not adapted"),
        ({"init_lora_weights": "pissa_niter_4"}, r"init_lora_weights is 'pissa_niter_4'; must be a way"),
        ({"r": 17}, r"lora_modules: mine: its rank r is 17; must be at most max_lora_rank=16"),
        ({"lora_alpha": None}, r"lora_alpha is missing; must be a positive number"),
    ],
)
def test_what_is_computed_otherwise_is_refused_by_name(
    tiny_model: Directory, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(tiny_model("qwen2"), write_adapter(tmp_path, tiny_model("qwen2"), 1, **changed))


def test_an_adapter_of_another_model_is_known_by_its_shapes(tiny_model: Directory, tmp_path: Path) -> None:
    message = r"q_proj.lora_B.weight has shape \(128, 8\); must be \(64, 8\): the adapter is of another model"
    with pytest.raises(ValueError, match=message):
        check(tiny_model("llama-gqa-tied"), write_adapter(tmp_path / "a", tiny_model("qwen3"), 1))
    with pytest.raises(
        ValueError, match=r"mine adapts 21 layers that the model does not have.*model.layers.0"
    ):
        check(tiny_model("opt"), write_adapter(tmp_path / "b", tiny_model("qwen2"), 1))
    # Only as far as shapes tell.
    check(tiny_model("llama3-rope"), write_adapter(tmp_path / "c", tiny_model("qwen2"), 1))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model.embed_tokens.lora_embedding_A", r"tensor .*embed_tokens.lora_embedding_A is not supported"),
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", r"lora_magnitude_vector is not supported"),
        (
            "lm_head.lora_A.weight",
            r"mine adapts 1 layers that the model does not have, or that can't be adapted: lm_h",
        ),
        ("model.layers.9.self_attn.q_proj.lora_A.weight", r"adapts 1 layers that the model does not have"),
        ("model.layers.0.mlp.experts.3.up_proj.lora_A.weight", r"adapts 1 layers of experts, which is not"),
    ],
)
def test_tensors_that_have_no_place_are_refused_by_name(
    tiny_model: Directory, tmp_path: Path, key: str, message: str
) -> None:
    adapter = write_adapter(tmp_path, tiny_model("qwen2"), 1)
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(
        tensors | {f"base_model.model.{key}": torch.zeros(8, 64)}, adapter / "adapter_model.safetensors"
    )
    with pytest.raises(ValueError, match=message):
        check(tiny_model("qwen2"), adapter)


def test_a_layer_that_comes_twice_is_refused(tiny_model: Directory, tmp_path: Path) -> None:
    """Only one of them would count, and nobody would know which."""
    adapter = write_adapter(tmp_path, tiny_model("qwen2"), 1)
    tensors = load_file(adapter / "adapter_model.safetensors")
    key = "model.layers.0.self_attn.q_proj.lora_A.weight"
    again = tensors[f"base_model.model.{key}"].clone()
    save_file(tensors | {key: again}, adapter / "adapter_model.safetensors")
    with pytest.raises(
        ValueError, match=r"tensors .*q_proj.lora_A.* and .* are of the same layer; must be one"
    ):
        check(tiny_model("qwen2"), adapter)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_that_may_not_be_read_are_named(tiny_model: Directory, tmp_path: Path, name: str) -> None:
    """Root may read all: what a process of its own may not open is anything on a disk that fails."""
    adapter = write_adapter(tmp_path, tiny_model("qwen2"), 1)
    (adapter / name).unlink()
    # It opens, and can't be read.
    (adapter / name).symlink_to("/proc/self/mem")
    with pytest.raises(ValueError, match=f"{name}: can't be read: |{name} is truncated"):
        check(tiny_model("qwen2"), adapter)


def test_an_alpha_that_is_larger_than_any_float_is_refused(tiny_model: Directory, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path, tiny_model("qwen2"), 1, lora_alpha=10**400)
    with pytest.raises(ValueError, match=r"lora_alpha is 10+ … 0+; must be a positive number"):
        check(tiny_model("qwen2"), adapter)


def test_weights_that_are_no_floats_are_refused(tiny_model: Directory, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path, tiny_model("qwen2"), 1)
    tensors = load_file(adapter / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file(tensors | {key: tensors[key].to(torch.int8)}, adapter / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"q_proj.lora_A.weight has dtype I8; must be one of"):
        check(tiny_model("qwen2"), adapter)


def test_files_that_are_not_there_are_named(tiny_model: Directory, tmp_path: Path) -> None:
    model, adapter = tiny_model("qwen2"), write_adapter(tmp_path / "a", tiny_model("qwen2"), 1)
    with pytest.raises(ValueError, match=r"lora_modules: mine: '/nowhere' is not a directory"):
        check(model, Path("/nowhere"))
    with pytest.raises(
        ValueError, match="holds no adapter_config.json; an adapter's directory must have one"
    ):
        check(model, model)
    tensors = load_file(adapter / "adapter_model.safetensors")
    gone = "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"
    save_file(
        {key: value for key, value in tensors.items() if key != gone}, adapter / "adapter_model.safetensors"
    )
    with pytest.raises(ValueError, match=r"lora_B of model.layers.1.self_attn.k_proj is missing"):
        check(model, adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no adapter_model.safetensors \(only safetensors are read"):
        check(model, adapter)


def test_what_adapters_take_is_counted(tiny_model: Directory, tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    adapters = [
        (name, str(write_adapter(tmp_path / name, model, 1, targets=ATTENTION, r=rank)))
        for name, rank in (("a", 4), ("b", 8))
    ]
    config = load_model_config(model)
    more = num_weight_bytes(config, torch.float32, None, adapters=adapters, max_lora_rank=16)
    # Of three layers: q, k and v, and o; each with room for the higher rank.
    values = 3 * 2 * 8 * ((3 * 64 + 64 + 32 + 32) + (64 + 64))
    assert more - num_weight_bytes(config, torch.float32, None) == 4 * values


def test_another_name_of_the_base_is_only_worth_a_warning(tiny_model: Directory, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path, tiny_model("qwen2"), 1, base_model_name_or_path="org/Base-1B")
    modules = [("mine", str(adapter))]
    assert other_bases("/models/base-1b/", modules) == []
    (warning,) = other_bases("other", modules)
    assert warning == "the adapter mine names org/Base-1B as its base model, but the model is other"
