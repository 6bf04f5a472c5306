"""Small models in the formats of quantised checkpoints, packed value by value from what is published of them, and the
same models in float32 with what the codes stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen2Config, Qwen3MoeConfig
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

from tests import tiny_models
from tests.tiny_models import _COMMON, _make_biases_and_norms_matter

# Wide enough for groups of 128.
_WIDE: dict[str, Any] = _COMMON | dict(
    hidden_size=128, intermediate_size=256, num_key_value_heads=2, num_hidden_layers=2, initializer_range=0.1
)
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_WIDE),
    "qwen2-tied": lambda: Qwen2Config(**_WIDE, tie_word_embeddings=True),
}
_EXPERTS: dict[str, Any] = _WIDE | dict(num_experts_per_tok=2)
MIXTURES: dict[str, Any] = {
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_EXPERTS, num_experts=4, moe_intermediate_size=128, norm_topk_prob=True
    ),
    "mixtral": lambda: MixtralConfig(**_EXPERTS, num_local_experts=4),
}
Tensors = dict[str, torch.Tensor]
# From a layer's weight to its tensors, by what follows its name, and to what they stand for.
Quantise = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
# AutoAWQ: the bits of a word, from the lowest, have these outputs.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Format:
    config: dict[str, Any]
    quantise: Quantise
    # Whether rows have eight bits.
    is_int: bool = True


def pack_words(codes: np.ndarray[Any, Any], bits: int) -> torch.Tensor:
    """[rows, codes] to [rows, words], the first code in the lowest bits."""
    per_word = 32 // bits
    rows, count = codes.shape
    words = np.zeros((rows, -(-count // per_word)), np.uint32)
    for column in range(count):
        words[:, column // per_word] |= codes[:, column].astype(np.uint32) << bits * (column % per_word)
    return torch.from_numpy(words.view(np.int32).copy())


def _coded(
    weight: torch.Tensor, bits: int, group: int, has_zeros: bool, scale_dtype: torch.dtype
) -> tuple[np.ndarray[Any, Any], torch.Tensor, np.ndarray[Any, Any], torch.Tensor]:
    """Codes from 0, scales [out, groups], zeros, and what they stand for."""
    num_out, num_in = weight.shape
    parts = weight.view(num_out, -1, group)
    least, most = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    largest = (1 << bits) - 1
    if has_zeros:
        scales = ((most - least) / largest).to(scale_dtype)
        zeros = (-least / scales.float()).round().clamp(1, largest)
    else:
        scales = (torch.maximum(-least, most) / (largest // 2)).to(scale_dtype)
        zeros = torch.full(scales.shape, float(1 << bits - 1))
    wide = scales.float().unsqueeze(2)
    codes = ((parts / wide).round() + zeros.unsqueeze(2)).clamp(0, largest)
    values = ((codes - zeros.unsqueeze(2)) * wide).view(num_out, num_in)
    return codes.view(num_out, num_in).numpy().astype(int), scales, zeros.numpy().astype(int), values


def gptq(bits: int, group: int, sym: bool, version: int = 1) -> Format:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        size = weight.shape[1] if group == -1 else group
        codes, scales, zeros, values = _coded(weight, bits, size, not sym, torch.float16)
        stored = zeros - 1 if version == 1 else zeros
        tensors = {
            "qweight": pack_words(codes, bits).T.contiguous(),
            "qzeros": pack_words(stored.T, bits),
            "scales": scales.T.contiguous(),
            "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // size,
        }
        return tensors, values

    config = dict(quant_method="gptq", bits=bits, group_size=group, sym=sym, desc_act=False)
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    return Format(config, quantise)


def awq(group: int) -> Format:
    def pack(codes: np.ndarray[Any, Any]) -> torch.Tensor:
        """[rows, outputs]."""
        rows, count = codes.shape
        words = np.zeros((rows, count // 8), np.uint32)
        for word in range(count // 8):
            for place, output in enumerate(AWQ_ORDER):
                words[:, word] |= codes[:, 8 * word + output].astype(np.uint32) << 4 * place
        return torch.from_numpy(words.view(np.int32).copy())

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros, values = _coded(weight, 4, group, True, torch.float16)
        tensors = {"qweight": pack(codes.T), "qzeros": pack(zeros.T), "scales": scales.T.contiguous()}
        return tensors, values

    config = dict(quant_method="awq", bits=4, group_size=group, zero_point=True, version="gemm")
    return Format(config, quantise)


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
            }
        },
        "quantization_status": "compressed",
    }


INT8_ROWS = dict(num_bits=8, type="int", strategy="token", dynamic=True, symmetric=True)


def packed(bits: int, group: int | None, symmetric: bool) -> Format:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        size = group or weight.shape[1]
        codes, scales, zeros, values = _coded(weight, bits, size, not symmetric, torch.bfloat16)
        tensors = {
            "weight_packed": pack_words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack_words(zeros.T, bits).T.contiguous()
        return tensors, values

    weights = dict(
        num_bits=bits,
        type="int",
        strategy="group" if group else "channel",
        group_size=group,
        symmetric=symmetric,
        dynamic=False,
        actorder=None,
    )
    return Format(_compressed("pack-quantized", weights, None), quantise)


def w8a8() -> Format:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, _, values = _coded(weight, 8, weight.shape[1], False, torch.float32)
        return {"weight": torch.from_numpy(codes - 128).to(torch.int8), "weight_scale": scales}, values

    weights = dict(num_bits=8, type="int", strategy="channel", symmetric=True, dynamic=False)
    return Format(_compressed("int-quantized", weights, INT8_ROWS), quantise)


def _as_fp8(
    weight: torch.Tensor, num_outputs: int | None, group: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales of blocks, and what they stand for."""
    num_out, num_in = weight.shape
    rows, columns = num_outputs or num_out, group or num_in
    codes, values = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty(-(-num_out // rows), -(-num_in // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            values[at] = codes[at].float() * scales[i, j]
    return codes, scales, values


def fp8(num_outputs: int | None, group: int | None, static: bool = False) -> Format:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, values = _as_fp8(weight, num_outputs, group)
        name = "weight_scale" if group is None else "weight_scale_inv"
        tensors = {"weight": codes, name: scales if group else scales.view(())}
        if static:
            tensors["input_scale"] = torch.tensor(0.01)
        return tensors, values

    config: dict[str, Any] = dict(
        quant_method="fp8", activation_scheme="static" if static else "dynamic", ignored_layers=["lm_head"]
    )
    if group:
        config["weight_block_size"] = [num_outputs, group]
    return Format(config, quantise, is_int=False)


def float_quantized(strategy: str, static: bool = False) -> Format:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, values = _as_fp8(weight, 1 if strategy == "channel" else None, None)
        tensors = {"weight": codes, "weight_scale": scales if strategy == "channel" else scales.view(1)}
        if static:
            tensors["input_scale"] = torch.tensor([0.01])
        return tensors, values

    inputs = dict(
        num_bits=8, type="float", strategy="tensor" if static else "token", dynamic=not static, symmetric=True
    )
    weights = dict(num_bits=8, type="float", strategy=strategy, symmetric=True, dynamic=False)
    return Format(_compressed("float-quantized", weights, inputs), quantise, is_int=False)


FORMATS: dict[str, Format] = {
    "w8a8": w8a8(),
    "float-tensor-static": float_quantized("tensor", static=True),
    "float-channel": float_quantized("channel"),
    "w4a16-128": packed(4, 128, symmetric=True),
    "w4a16-32-asym": packed(4, 32, symmetric=False),
    "w4a16-channel": packed(4, None, symmetric=True),
    "w8a16-channel": packed(8, None, symmetric=True),
    "w8a16-64-asym": packed(8, 64, symmetric=False),
    "fp8-tensor": fp8(None, None),
    "fp8-tensor-static": fp8(None, None, static=True),
    "fp8-block": fp8(128, 128),
    "gptq-4-128": gptq(4, 128, sym=True),
    "gptq-4-64-asym": gptq(4, 64, sym=False),
    "gptq-4-channel": gptq(4, -1, sym=True),
    "gptq-4-32-v2": gptq(4, 32, sym=False, version=2),
    "gptq-8-128": gptq(8, 128, sym=True),
    "gptq-8-channel": gptq(8, -1, sym=True),
    "awq-128": awq(128),
    "awq-64": awq(64),
    "awq-32": awq(32),
}


def is_linear(name: str) -> bool:
    return name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))


def build(model: str, form: Format, directory: Path) -> tuple[Path, Path]:
    """Saves a checkpoint in this format, and the same model in float32. Returns their directories."""
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config((MODELS | MIXTURES)[model](), attn_implementation="eager")
    _make_biases_and_norms_matter(made)
    made.save_pretrained(directory / "random")
    return convert(directory / "random", form, directory)


def convert(model: Path, form: Format, directory: Path) -> tuple[Path, Path]:
    """Makes the two of a model, in folders of `directory`."""
    stored, plain = (Path(copytree(model, directory / name)) for name in ("stored", "plain"))
    tensors: Tensors = {}
    values = {name: each.float() for name, each in load_file(model / "model.safetensors").items()}
    for name, weight in list(values.items()):
        if is_linear(name):
            layer, values[name] = form.quantise(weight)
            tensors |= {f"{name.removesuffix('weight')}{key}": each for key, each in layer.items()}
        else:
            tensors[name] = weight
    save_file({name: each.contiguous() for name, each in values.items()}, plain / "model.safetensors")
    save_file(tensors, stored / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"quantization_config": form.config}))
    return stored, plain


def as_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., in] to blocks [..., group, 16] of two codes in a byte, and scales [..., group]."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 2
    scaled = groups / exponents.exp2().unsqueeze(-1)
    codes = (scaled.unsqueeze(-1) - torch.tensor(FP4_VALUES)).abs().argmin(-1).byte()
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).byte()


def build_mxfp4(directory: Path, plain_layers: tuple[int, ...] = ()) -> tuple[Path, Path]:
    """Saves gpt-oss with experts in MXFP4, but for those of some layers, and the same model in float32, whose experts
    are what transformers makes of the codes. Returns their directories."""
    random = tiny_models.build("gpt-oss", directory / "random")
    stored, plain = (Path(copytree(random, directory / name)) for name in ("stored", "plain"))
    values, tensors = load_file(random / "model.safetensors"), {}
    for name, weight in list(values.items()):
        is_plain = any(f".{layer}.mlp." in name for layer in plain_layers)
        if is_plain or not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = weight
            continue
        blocks, scales = as_mxfp4(weight.transpose(1, 2))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(values, plain / "model.safetensors")
    save_file(tensors, stored / "model.safetensors")
    kept = [f"model.layers.{layer}.mlp.experts" for layer in plain_layers]
    config = json.loads((random / "config.json").read_text())
    config["quantization_config"] = dict(
        quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head", *kept]
    )
    (stored / "config.json").write_text(json.dumps(config))
    return stored, plain


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


def change_tensors(directory: Path, change: Callable[[Tensors], None]) -> None:
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)
