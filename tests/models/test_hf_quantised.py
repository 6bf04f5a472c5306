"""The config.json of a quantised checkpoint: what is read, and what is refused with a one-line error."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from alignedserve.models.fields import Fields
from alignedserve.models.hf_quantised import read_quantised
from alignedserve.models.quantised.config import QuantisedConfig
from tests.quantised_checkpoints import FORMATS

PACKED: dict[str, Any] = FORMATS["w4a16-128"].config
W8A8: dict[str, Any] = FORMATS["w8a8"].config
FLOAT: dict[str, Any] = FORMATS["float-channel"].config


def read(config: dict[str, Any]) -> QuantisedConfig:
    found = read_quantised(Fields({"quantization_config": config}, "config.json"))
    assert found is not None
    return found


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`path`: keys with dots between them; of compressed-tensors, from its only group on if it begins with one."""
    config = copy.deepcopy(config)
    *keys, last = path.split(".")
    at = config["config_groups"]["group_0"] if keys else config
    for key in keys[1:]:
        at = at[key]
    at[last] = value
    return config


def test_what_formats_say_of_themselves() -> None:
    found = {name: read(each.config) for name, each in FORMATS.items()}
    assert {
        name: (each.kind, each.group, each.num_outputs, each.has_zeros) for name, each in found.items()
    } == {
        "w8a8": ("int8", None, 1, False),
        "float-tensor-static": ("fp8", None, None, False),
        "float-channel": ("fp8", None, 1, False),
        "w4a16-128": ("int4", 128, 1, False),
        "w4a16-32-asym": ("int4", 32, 1, True),
        "w4a16-channel": ("int4", None, 1, False),
        "w8a16-channel": ("int8", None, 1, False),
        "w8a16-64-asym": ("int8", 64, 1, True),
        "fp8-tensor": ("fp8", None, None, False),
        "fp8-tensor-static": ("fp8", None, None, False),
        "fp8-block": ("fp8", 128, 128, False),
        "gptq-4-128": ("int4", 128, 1, False),
        "gptq-4-64-asym": ("int4", 64, 1, True),
        "gptq-4-channel": ("int4", None, 1, False),
        "gptq-4-32-v2": ("int4", 32, 1, True),
        "gptq-8-128": ("int8", 128, 1, False),
        "gptq-8-channel": ("int8", None, 1, False),
        "awq-128": ("int4", 128, 1, True),
        "awq-64": ("int4", 64, 1, True),
        "awq-32": ("int4", 32, 1, True),
    }
    assert not any(each.has("lm_head") for each in found.values())
    assert all(each.has("model.layers.3.mlp.down_proj") for each in found.values())


def test_names_and_patterns_of_layers() -> None:
    ignored = ["re:.*lm_head", "model.layers.1.mlp", "self_attn.k_proj"]
    found = read(changed(PACKED, "ignore", ignored))
    assert not found.has("lm_head") and not found.has("model.layers.1.mlp.up_proj")
    assert not found.has("model.layers.7.self_attn.k_proj")
    assert found.has("model.layers.11.mlp.up_proj") and found.has("model.layers.7.self_attn.q_proj")
    some = read(changed(PACKED, "group.targets", [r"re:.*layers\.0\..*"]))
    assert some.has("model.layers.0.mlp.up_proj") and not some.has("model.layers.1.mlp.up_proj")
    skipped = read(FORMATS["gptq-4-128"].config | {"dynamic": {r"-:.*down_proj": {}}})
    assert not skipped.has("model.layers.0.mlp.down_proj") and skipped.has("model.layers.0.mlp.up_proj")


def test_groups_that_agree_are_one() -> None:
    config = changed(PACKED, "group.targets", ["re:.*q_proj"])
    config["config_groups"]["group_1"] = copy.deepcopy(PACKED["config_groups"]["group_0"]) | {
        "targets": ["re:.*k_proj"]
    }
    assert read(config).targets == ("re:.*k_proj", "re:.*q_proj")
    config["config_groups"]["group_1"]["weights"]["group_size"] = 64
    with pytest.raises(
        ValueError, match="group_0 and group_1 are not alike; layers must all be quantized in one way"
    ):
        read(config)


def test_older_files_say_it_elsewhere() -> None:
    found = read_quantised(Fields({"compression_config": W8A8}, "config.json"))
    assert found == read(W8A8)
    assert read_quantised(Fields({}, "config.json")) is None


GPTQ, AWQ, FP8 = (FORMATS[name].config for name in ("gptq-4-128", "awq-128", "fp8-block"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "hqq"},
            "quant_method is 'hqq'; must be one of awq, compressed-tensors, fp8, gguf, gptq, mxfp4",
        ),
        ({}, "quant_method is missing; must be one of awq, compressed-tensors, fp8, gguf, gptq"),
        ({"quant_method": ["gptq"]}, "quant_method is .*; must be one of awq"),
        (GPTQ | {"bits": 3}, "bits is 3; must be 4 or 8"),
        (GPTQ | {"bits": [4]}, "bits is .*; must be 4 or 8"),
        (GPTQ | {"group_size": 16}, "group_size is 16; must be -1, or a multiple of 32"),
        (GPTQ | {"group_size": None}, "group_size is missing; must be -1, or a multiple of 32"),
        (GPTQ | {"desc_act": True}, "desc_act is True; must be false if group_size is not -1"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; must be one of gptq, gptq_v2"),
        (GPTQ | {"dynamic": {r"+:.*down": {"bits": 8}}}, "dynamic is .*; must be absent"),
        (GPTQ | {"modules_in_block_to_quantize": [["q"]]}, "modules_in_block_to_quantize is .*; must be absent"),
        (AWQ | {"bits": 8}, "bits is 8; must be 4"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'; must be gemm"),
        (AWQ | {"zero_point": False}, "zero_point is False; must be true"),
        (AWQ | {"modules_to_not_convert": "x"}, "modules_to_not_convert is 'x'; must be a list of names"),
        (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2'; must be one of e4m3"),
        (FP8 | {"activation_scheme": "x"}, "activation_scheme is 'x'; must be one of static, dynamic"),
        (FP8 | {"weight_block_size": [128, 127]}, r"weight_block_size is \[128, 127\]; must be two positive"),
        (FP8 | {"weight_block_size": 128}, "weight_block_size is 128; must be two positive"),
        (FP8 | {"ignored_layers": ["re:("]}, "ignored_layers is .*; must be regular expressions"),
        (changed(PACKED, "format", "marlin-24"), "format is 'marlin-24'; must be one of float-quantized, int-quant"),
        (changed(PACKED, "kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme is .*; must be absent"),
        (changed(PACKED, "transform_config", {"config_groups": {"R1": {}}}), "transform_config is .*; must be absent"),
        (changed(PACKED, "sparsity_config", {"format": "sparse-24"}), "sparsity_config: format is 'sparse-24'"),
        (changed(PACKED, "config_groups", {}), "config_groups is {}; must be an object"),
        (changed(PACKED, "group.weights", None), "group_0 has no weights"),
        (changed(PACKED, "group.weights.num_bits", 3), "weights: num_bits is 3; must be 4 or 8"),
        (changed(PACKED, "group.weights.type", "float"), "weights: type is 'float'; must be int"),
        (changed(PACKED, "group.weights.strategy", "tensor_group"), "strategy is 'tensor_group'; must be tensor"),
        (changed(PACKED, "group.weights.strategy", "block"), "strategy is 'block'; must be tensor"),
        (changed(PACKED, "group.weights.actorder", "group"), "actorder is 'group'; must be weight or static"),
        (changed(PACKED, "group.weights.group_size", 48), "group_size is 48; must be -1, or a multiple of 32"),
        (changed(PACKED, "group.output_activations", {"num_bits": 8}), "output_activations is .*; must be absent"),
        (changed(W8A8, "group.input_activations.dynamic", False), "dynamic is False; must be true"),
        (changed(W8A8, "group.input_activations.symmetric", False), "symmetric is False; must be true"),
        (changed(W8A8, "group.input_activations.num_bits", 4), "input_activations: num_bits is 4; must be 8"),
        (changed(W8A8, "group.weights.num_bits", 4), "weights: num_bits is 4; must be 8"),
        (changed(FLOAT, "group.weights.num_bits", 4), "weights: num_bits is 4; must be 8"),
        (changed(FLOAT, "group.weights.symmetric", False), "weights: symmetric is False; must be true"),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_line_with_the_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        read(config)
    assert "\n" not in str(raised.value) and str(raised.value).startswith("config.json: quantization_config")
