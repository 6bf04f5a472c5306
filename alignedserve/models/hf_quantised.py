"""The quantisation of a checkpoint in its config.json."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from alignedserve.models.fields import Fields
from alignedserve.models.quantised.config import REGEX, QuantisedConfig

# The kernels need integer groups in multiples of 32, and FP8 groups in multiples of two.
INT_BLOCK, FP8_BLOCK = 32, 2
MXFP4_GROUP = 32
INT_KINDS = {4: "int4", 8: "int8"}
# AutoFP8 and AutoAWQ never quantise the output layer, even if the file does not say so.
NEVER = ("lm_head",)


def read_quantised(fields: Fields) -> QuantisedConfig | None:
    """Raises ValueError for a scheme that can't be read or computed."""
    # Older files of compressed-tensors have the second name.
    found = fields.nested("quantization_config") or fields.nested("compression_config")
    if found is None:
        return None
    method = found.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        raise found.error("quant_method", "one of " + ", ".join(sorted(READERS)))
    return READERS[method](found)


def _awq(fields: Fields) -> QuantisedConfig:
    bits_key = "w_bit" if fields.get("w_bit") is not None else "bits"
    if fields.get(bits_key) != 4:
        raise fields.error(bits_key, "4")
    if str(fields.get("version") or "gemm").lower() != "gemm":
        raise fields.error("version", "gemm")
    if not fields.flag("zero_point", True):
        raise fields.error("zero_point", "true")
    group_key = "q_group_size" if fields.get("q_group_size") is not None else "group_size"
    return QuantisedConfig(
        "awq",
        "awq",
        "int4",
        _group(fields, group_key),
        has_zeros=True,
        ignored=NEVER + _names(fields, "modules_to_not_convert"),
    )


def _gptq(fields: Fields) -> QuantisedConfig:
    kind, group = _int_kind(fields, "bits"), _group(fields, "group_size")
    if fields.flag("desc_act", False) and group is not None:
        raise fields.error("desc_act", "false if group_size is not -1: inputs can't be reordered")
    form = fields.choice("checkpoint_format", {"gptq": "gptq", "gptq_v2": "gptq_v2"}, "gptq")
    for key in ("modules_in_block_to_quantize", "is_marlin_format"):
        if fields.get(key):
            raise fields.error(key, "absent")
    return QuantisedConfig(
        "gptq",
        "gptq",
        kind,
        group,
        has_zeros=not fields.flag("sym", True),
        zero_offset=1 if form == "gptq" else 0,
        has_empty_biases=True,
        ignored=(() if fields.flag("lm_head", False) else NEVER)
        + _names(fields, "modules_to_not_convert")
        + _skipped(fields),
    )


def _skipped(fields: Fields) -> tuple[str, ...]:
    """The patterns of layers that are not quantised. GPTQModel's `dynamic` maps names to settings; a name after `-:` is
    excluded."""
    rules = fields.nested("dynamic")
    names = [] if rules is None else list(rules.values)
    if not all(name.startswith("-:") for name in names):
        raise fields.error("dynamic", "absent, or have names that begin with -: alone")
    return tuple(_pattern(fields, "dynamic", REGEX + name.removeprefix("-:")) for name in names)


def _fp8(fields: Fields) -> QuantisedConfig:
    fields.choice("fmt", {"e4m3": "e4m3", "float8_e4m3fn": "e4m3"}, "e4m3")
    scheme = fields.choice("activation_scheme", {"static": "static", "dynamic": "dynamic"}, "dynamic")
    num_outputs, group = _blocks(fields, "weight_block_size")
    return QuantisedConfig(
        "fp8",
        "plain" if num_outputs is None else "inverse",
        "fp8",
        group,
        num_outputs,
        has_input_scales=scheme == "static",
        ignored=NEVER + _names(fields, "ignored_layers") + _names(fields, "modules_to_not_convert"),
    )


def _compressed(fields: Fields) -> QuantisedConfig:
    for key in ("kv_cache_scheme", "transform_config"):
        if fields.get(key):
            raise fields.error(key, "absent")
    sparsity = fields.nested("sparsity_config")
    if sparsity is not None and sparsity.get("format") not in (None, "dense"):
        raise sparsity.error("format", "dense")
    groups = fields.nested("config_groups")
    if groups is None or not groups.values:
        raise fields.error("config_groups", "an object from names to settings")
    ignored = _names(fields, "ignore")
    found = {name: _compressed_group(fields, groups, name, ignored) for name in groups.values}
    first, *others = found
    for other in others:
        if replace(found[other], targets=()) != replace(found[first], targets=()):
            raise ValueError(
                f"{groups.where}: {first} and {other} are not alike; layers must all be quantized in one way"
            )
    targets = {name for config in found.values() for name in config.targets}
    # Embeddings are not linear layers, and `has` is called for linear layers alone.
    return replace(found[first], targets=() if "Linear" in targets else tuple(sorted(targets)))


def _compressed_group(fields: Fields, groups: Fields, name: str, ignored: tuple[str, ...]) -> QuantisedConfig:
    group = groups.nested(name)
    weights = None if group is None else group.nested("weights")
    if group is None or weights is None:
        raise ValueError(f"{groups.where}: {name} has no weights; must have settings of weights")
    form = Fields({"format": group.get("format") or fields.get("format")}, fields.where)
    layout = form.choice("format", {name: layout for name, (layout, _) in FORMATS.items()}, "")
    wanted = FORMATS[form.get("format")][1]
    if weights.get("type") != wanted:
        raise weights.error("type", wanted)
    if group.get("output_activations"):
        raise group.error("output_activations", "absent")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise weights.error("actorder", "weight or static: inputs can't be reordered")
    num_outputs, size = _strategy(weights)
    is_float = wanted == "float"
    if is_float and weights.get("num_bits") != 8:
        raise weights.error("num_bits", "8")
    if form.get("format") == "int-quantized" and weights.get("num_bits") != 8:
        raise weights.error("num_bits", "8")
    is_symmetric = weights.flag("symmetric", True)
    if is_float and not is_symmetric:
        raise weights.error("symmetric", "true")
    return QuantisedConfig(
        f"compressed-tensors {form.get('format')}",
        layout,
        "fp8" if is_float else _int_kind(weights, "num_bits"),
        size,
        num_outputs,
        has_zeros=not is_symmetric,
        has_input_scales=_has_input_scales(group, is_float),
        targets=_names(group, "targets"),
        ignored=ignored,
    )


# The layout and the type of each format of compressed-tensors.
FORMATS = {
    "float-quantized": ("plain", "float"),
    "int-quantized": ("plain", "int"),
    "pack-quantized": ("packed", "int"),
}


def _strategy(weights: Fields) -> tuple[int | None, int | None]:
    """The numbers of outputs and of inputs that share a scale; None: all."""
    match weights.get("strategy"):
        case "tensor":
            return None, None
        case "channel":
            return 1, None
        case "group":
            return 1, _group(weights, "group_size")
        case "block" if weights.get("type") == "float":
            num_outputs, group = _blocks(weights, "block_structure")
            if num_outputs is None:
                raise weights.error("block_structure", "two positive integers")
            return num_outputs, group
    raise weights.error("strategy", "tensor, channel, group, or with FP8 block")


def _has_input_scales(group: Fields, is_float: bool) -> bool:
    """Whether the checkpoint has scales of inputs. Integer kernels quantise rows themselves; FP8 kernels leave them as
    they are."""
    inputs = group.nested("input_activations")
    if inputs is None:
        return False
    is_static = inputs.get("dynamic") is not True
    if inputs.get("num_bits") != 8:
        raise inputs.error("num_bits", "8")
    if is_float:
        return is_static
    if inputs.get("type") != "int":
        raise inputs.error("type", "int, like the type of weights")
    if is_static:
        raise inputs.error("dynamic", "true: rows of integers have scales of their own")
    if not inputs.flag("symmetric", True):
        raise inputs.error("symmetric", "true: rows of integers have no zeros of their own")
    return False


def _mxfp4(fields: Fields) -> QuantisedConfig:
    """Only experts are quantized, whatever else the file names or omits."""
    return QuantisedConfig(
        "mxfp4",
        "mxfp4",
        "mxfp4",
        MXFP4_GROUP,
        targets=("mlp.experts",),
        ignored=tuple(_module_pattern(fields, name) for name in _names(fields, "modules_to_not_convert")),
    )


def _module_pattern(fields: Fields, name: str) -> str:
    """Matches a module of this name, which may be a regular expression, and everything inside it."""
    pattern = REGEX + rf"(?:.*\.)?(?:{name.removeprefix(REGEX)})(?:\.|$)"
    return _pattern(fields, "modules_to_not_convert", pattern)


def _gguf(fields: Fields) -> QuantisedConfig:
    # Each tensor has its own type, which its file says.
    return QuantisedConfig("gguf", "gguf", ", ".join(_names(fields, "types")), None)


READERS: dict[str, Callable[[Fields], QuantisedConfig]] = {
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gguf": _gguf,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}


def _int_kind(fields: Fields, key: str) -> str:
    bits = fields.get(key)
    if type(bits) is not int or bits not in INT_KINDS:
        raise fields.error(key, "4 or 8")
    return INT_KINDS[bits]


def _group(fields: Fields, key: str) -> int | None:
    value = fields.get(key)
    if value == -1:
        return None
    if type(value) is not int or value < 1 or value % INT_BLOCK:
        raise fields.error(key, f"-1, or a multiple of {INT_BLOCK}")
    return value


def _blocks(fields: Fields, key: str) -> tuple[int | None, int | None]:
    """The outputs and inputs of a block; None without blocks."""
    value: Any = fields.get(key)
    if value is None:
        return None, None
    is_pair = isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)
    if not is_pair or value[1] % FP8_BLOCK:
        raise fields.error(key, "two positive integers, the second of them even")
    return value[0], value[1]


def _names(fields: Fields, key: str) -> tuple[str, ...]:
    value = fields.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise fields.error(key, "a list of names")
    return tuple(_pattern(fields, key, name) for name in value)


def _pattern(fields: Fields, key: str, name: str) -> str:
    if name.startswith(REGEX):
        try:
            re.compile(name.removeprefix(REGEX))
        except re.error as error:
            raise fields.error(key, f"regular expressions after {REGEX}: {error}") from None
    return name
