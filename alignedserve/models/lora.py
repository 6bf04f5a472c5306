"""Adapters (LoRA) in peft's format: a directory with adapter_config.json and adapter_model.safetensors.

An adapted layer has two tensors, named after the layer: lora_A.weight [rank, in] and lora_B.weight [out, rank]. As with
a checkpoint, the model's constructor is the only list of possible layers: each linear layer asks for its own tensors,
and tensors that remain at the end are an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from alignedserve.models.fields import Fields, read_json_object
from alignedserve.models.safetensors_file import SafetensorsFile
from alignedserve.models.weights import TakePart, WeightSource, some
from alignedserve.ops.adapters import Delta, LayerAdapters
from alignedserve.ops.quantise import Part

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")
# peft's settings that make an adapter more than a product of two matrices beside a layer. null, false and empty mean
# that the setting is off.
UNSUPPORTED = {
    "use_dora": "false: DoRA scales weights as well",
    "modules_to_save": "absent: whole layers beside the low-rank ones are not supported",
    "rank_pattern": "absent: all layers have the same rank",
    "alpha_pattern": "absent: all layers have the same lora_alpha",
    "fan_in_fan_out": "false: no supported model has such layers",
    "lora_bias": "false: biases are not supported",
    "layer_replication": "absent: the layers of the base model are not changed",
    "target_parameters": "absent: experts' weights are not adapted",
    "trainable_token_indices": "absent: embeddings are not adapted",
    "use_qalora": "false: inputs are not grouped",
    "alora_invocation_tokens": "absent: an adapter applies from the first token on",
    "kasa_config": "absent: KaSA scales products as well",
    "arrow_config": "absent: adapters are not mixed",
    "use_bdlora": "absent: block-diagonal adapters are not supported",
    "monteclora_config": "absent: such adapters are drawn at random",
    "velora_config": "absent: inputs are not compressed",
}
# These initialisations change the base model's weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class LoraConfig:
    rank: int
    scale: float
    # The base model's name in the adapter's config; empty if it has none.
    base: str


def load_lora_config(directory: Path) -> LoraConfig:
    """Raises ValueError if adapter_config.json is missing, malformed, or describes something unsupported."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{directory} holds no {CONFIG_FILE}; an adapter's directory must have one")
    fields = Fields(read_json_object(path), str(path))
    if fields.get("peft_type") != "LORA":
        raise fields.error("peft_type", "'LORA'")
    for name, allowed in UNSUPPORTED.items():
        if fields.get(name):
            raise fields.error(name, allowed)
    if fields.get("bias") not in (None, "none"):
        raise fields.error("bias", "'none': biases are not supported")
    if str(fields.get("init_lora_weights")).lower().startswith(_CHANGES_BASE):
        raise fields.error(
            "init_lora_weights", "a way that leaves the base model as it is; peft can convert such an adapter"
        )
    rank, alpha = fields.size("r"), fields.positive("lora_alpha")
    scale = alpha / (math.sqrt(rank) if fields.flag("use_rslora", False) else rank)
    return LoraConfig(rank, scale, str(fields.get("base_model_name_or_path") or ""))


class Adapter:
    """An adapter's files. Its tensors are views of the mapped file."""

    def __init__(self, name: str, directory: Path, max_rank: int) -> None:
        """Raises ValueError if the directory holds no adapter, or one of a higher rank."""
        self.name = name
        if not directory.is_dir():
            raise ValueError(f"lora_modules: {name}: {str(directory)!r} is not a directory")
        self.config = load_lora_config(directory)
        if self.config.rank > max_rank:
            raise ValueError(
                f"lora_modules: {name}: its rank r is {self.config.rank}; must be at most max_lora_rank={max_rank}"
            )
        path = directory / WEIGHTS_FILE
        if not path.is_file():
            raise ValueError(
                f"{directory} holds no {WEIGHTS_FILE} (only safetensors are read, never pickled .bin files)"
            )
        self._file = SafetensorsFile(path)
        # Tensor names in the file, by the layer's name and "A" or "B".
        self._keys = _keys_of(path, self._file)
        self._left = {layer for layer, _ in self._keys}
        if not self._left:
            raise ValueError(f"{path} holds no tensors")

    def take(self, layer: str, out_features: int, in_features: int) -> Delta | None:
        """Returns what the adapter adds to a layer; None if nothing. Raises ValueError with both shapes if its shape
        does not fit."""
        # The names of a checkpoint, of the bare decoder and of a vision model: see SafetensorsSource.
        bare = layer.removeprefix("model.")
        names = (layer, bare, f"language_model.{layer}", f"model.language_model.{bare}")
        found = next((name for name in names if name in self._left), None)
        if found is None:
            return None
        self._left.remove(found)
        rank = self.config.rank
        return Delta(
            self._tensor(found, "A", (rank, in_features)), self._tensor(found, "B", (out_features, rank))
        )

    def finish(self) -> None:
        """Raises ValueError if tensors are left that the model did not take."""
        if not self._left:
            return
        of_experts = [layer for layer in self._left if ".experts." in layer]
        if of_experts:
            raise ValueError(
                f"lora_modules: {self.name} adapts {len(of_experts)} layers of experts, which is not supported: "
                f"{some(of_experts)}"
            )
        raise ValueError(
            f"lora_modules: {self.name} adapts {len(self._left)} layers that the model does not have, or that can't "
            f"be adapted: {some(self._left)}"
        )

    def _tensor(self, layer: str, which: str, shape: tuple[int, int]) -> torch.Tensor:
        key = self._keys.get((layer, which))
        if key is None:
            raise ValueError(
                f"{self._file.path}: lora_{which} of {layer} is missing; lora_A and lora_B belong together"
            )
        stored = self._file.entries[key].shape
        if stored != shape:
            raise ValueError(
                f"{self._file.path}: {key} has shape {stored}; must be {shape}: the adapter is of another model, or "
                "has another rank"
            )
        self._file.dtype_of(key)
        return self._file.tensor(key)


def _keys_of(path: Path, file: SafetensorsFile) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for key in file.entries:
        place = _layer_and_kind(path, key)
        if place in found:
            raise ValueError(f"{path}: tensors {found[place]} and {key} are of the same layer; must be one")
        found[place] = key
    return found


def _layer_and_kind(path: Path, key: str) -> tuple[str, str]:
    found = _KEY.fullmatch(key)
    if found is None:
        raise ValueError(
            f"{path}: tensor {key} is not supported; must be the lora_A.weight or lora_B.weight of a linear layer"
        )
    return found["module"], found["which"]


class AdaptedLayer(NamedTuple):
    """A layer of the model that adapters may change."""

    # Its names in the checkpoint, and their widths.
    names: Sequence[str]
    out_features: Sequence[int]
    in_features: int
    # The widths of the parts of a layer with one name; None: each name is a part.
    split: Sequence[int] | None
    # The layer (`ops.base.Linear`), with its adapters.
    weight: Any


class NumberedAdapters:
    """All adapters of a model, numbered from 1."""

    def __init__(self, adapters: Sequence[Adapter], num_places: int = 0, max_rank: int = 0) -> None:
        """`num_places`: every layer has room for this many adapters of `max_rank`; 0: only for those given."""
        self._adapters = adapters
        self.num_places = num_places
        self.max_rank = max_rank
        # Filled while the model is built.
        self.layers: list[AdaptedLayer] = []

    def take(
        self, layers: Sequence[str], out_features: Sequence[int], in_features: int
    ) -> LayerAdapters | None:
        """Returns what the adapters add to a layer that is made of several in the checkpoint; None if nothing."""
        deltas = [
            [each.take(layer, out, in_features) for layer, out in zip(layers, out_features, strict=True)]
            for each in self._adapters
        ]
        if not self.num_places and not any(delta for parts in deltas for delta in parts):
            return None
        scales = [each.config.scale for each in self._adapters]
        for _ in range(self.num_places - len(deltas)):
            deltas.append([None] * len(layers))
            scales.append(0.0)
        min_rank = self.max_rank if self.num_places else 0
        return LayerAdapters(in_features, tuple(out_features), deltas, scales, min_rank)

    def finish(self) -> None:
        """Raises ValueError if an adapter has tensors left that the model did not take."""
        for each in self._adapters:
            each.finish()


class AdaptedSource:
    """A WeightSource of a model with adapters."""

    def __init__(self, weights: WeightSource, adapters: NumberedAdapters) -> None:
        self._weights = weights
        self.adapters = adapters

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._weights.take(name, shape)

    def linear(self, layer: str, num_out: int, num_in: int) -> Part:
        return self._weights.linear(layer, num_out, num_in)

    def of_experts(self, layer: str, num_experts: int, num_out: int, num_in: int) -> TakePart:
        return self._weights.of_experts(layer, num_experts, num_out, num_in)

    def finish(self) -> None:
        self._weights.finish()
        self.adapters.finish()


def with_adapters(
    weights: WeightSource, modules: Sequence[tuple[str, str]], max_rank: int, num_places: int = 0
) -> WeightSource:
    """Adds the adapters in `modules`, (name, path) each, to a source of the model's tensors. `num_places`: see
    NumberedAdapters. Raises ValueError if one is not supported."""
    if not modules and not num_places:
        return weights
    adapters = [Adapter(name, Path(path).expanduser(), max_rank) for name, path in modules]
    return AdaptedSource(weights, NumberedAdapters(adapters, num_places, max_rank))


def other_bases(model: str, modules: Sequence[tuple[str, str]]) -> list[str]:
    """Returns a warning for each adapter with another base model in its config."""
    warnings = []
    for name, path in modules:
        base = load_lora_config(Path(path).expanduser()).base
        if base and _last_part(base) != _last_part(model):
            warnings.append(f"the adapter {name} names {base} as its base model, but the model is {model}")
    return warnings


def _last_part(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].lower()
