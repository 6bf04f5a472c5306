"""The weights of GGUF files. Those of linear layers and experts stay in codes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from alignedserve.models.file_map import map_file
from alignedserve.models.gguf.config import config_of
from alignedserve.models.gguf.container import FIXED_BYTES, Header
from alignedserve.models.gguf.directory import linked_files, read_headers, refuse_other_version, whole
from alignedserve.models.gguf.names import hf_entries
from alignedserve.models.mapped_file import MappedFile
from alignedserve.models.weights import CheckpointSource, TakePart
from alignedserve.ops.quantise import GgufWeight, Part

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# In files of these families, each value of a head of q and k is beside the one that it is rotated with.
_HAVE_PAIRS = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM")
# The files of this family have 1 added to the weights of norms, which the model adds.
_HAS_WHOLE_NORMS = "Gemma3ForCausalLM"
# gpt-oss's layer of all experts has gates and ups alternating along the outputs. Its biases end like this.
_PARTS_OF = {"gate_up_proj": ("gate_proj", "up_proj")}
_BIAS_OF_ALL = "_bias"


class GgufFile(MappedFile):
    """A GGUF file, with names and order of rows as on the hub."""

    def __init__(self, header: Header, config: dict[str, Any]) -> None:
        self._family = config["architectures"][0]
        self._heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        try:
            entries = dict(hf_entries(self._family, header.tensors, config.get("num_local_experts", 0)))
        except ValueError as error:
            raise ValueError(f"{header.path}: {error}") from None
        super().__init__(header.path, map_file(header.path, FIXED_BYTES), entries)

    def is_coded(self, name: str) -> bool:
        return self.entries[name].dtype not in _DTYPES

    def dtype_of(self, name: str) -> torch.dtype:
        return _DTYPES.get(self.entries[name].dtype, torch.float32)

    def tensor(self, name: str) -> torch.Tensor:
        if self.is_coded(name):
            return self.in_order(name, self.codes(name).dequantised().view(self.entries[name].shape))
        stored = self.stored_values(name, self.dtype_of(name))
        if self._family == _HAS_WHOLE_NORMS and name.endswith("norm.weight"):
            return stored - 1
        return self.in_order(name, stored)

    def codes(self, name: str) -> GgufWeight:
        """Returns a view of the file, with the rows in their order there."""
        entry = self.entries[name]
        return GgufWeight(entry.dtype, self.stored_bytes(name).view(math.prod(entry.shape[:-1]), -1))

    def in_order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows of q or k in the order in which the first half of a head is rotated with the second."""
        layer, _, part = name.rpartition(".")[0].rpartition(".self_attn.")
        heads = self._heads.get(part.removesuffix("_proj"))
        if self._family not in _HAVE_PAIRS or not layer or heads is None:
            return rows
        return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


class GgufSource(CheckpointSource[GgufFile]):
    """The GGUF files that a directory of `directory.py` links to."""

    def __init__(
        self, directory: Path, dtype: torch.dtype, device: torch.device | str, progress: bool = True
    ) -> None:
        headers = read_headers([path.resolve() for path in linked_files(directory)])
        config = config_of(whole(headers))
        files = [GgufFile(header, config) for header in headers]
        # Only after they are open: what is open can't be replaced.
        refuse_other_version(directory)
        super().__init__(
            headers[0].path, {name: file for file in files for name in file.entries}, dtype, device, progress
        )

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        parts = _stored_parts(name, shape)
        if len(parts) > 1:
            taken = torch.stack([self.take(*part) for part in parts])
            return taken.view(shape[0], -1, taken.shape[1]).transpose(1, 2).reshape(shape)
        file, stored_name = self.expect(name, shape)
        if not file.is_coded(stored_name):
            return super().take(name, shape)
        self._drop_read()
        self._count(stored_name)
        values = file.codes(stored_name).dequantised(self._dtype).to(self._device)
        if not values.isfinite().all():
            raise ValueError(f"{file.path}: {stored_name} has a value that is not finite")
        return file.in_order(stored_name, values.view(shape))

    def expect(self, name: str, shape: tuple[int, ...]) -> tuple[GgufFile, str]:
        first, *_ = [super(GgufSource, self).expect(*part) for part in _stored_parts(name, shape)]
        return first

    def linear(self, layer: str, num_out: int, num_in: int) -> Part:
        name = f"{layer}.weight"
        file, stored_name = self.expect(name, (num_out, num_in))
        if not file.is_coded(stored_name):
            return super().take(name, (num_out, num_in))
        self._drop_read()
        self._count(stored_name)
        codes = file.codes(stored_name)
        # Codes are decoded on the CPU, also for a GPU.
        return GgufWeight(codes.type, file.in_order(stored_name, codes.data))

    def of_experts(self, layer: str, num_experts: int, num_out: int, num_in: int) -> TakePart:
        def take(number: int) -> Part:
            parts = _parts_of_expert(layer, number)
            return _alternating(layer, [self.linear(part, num_out // len(parts), num_in) for part in parts])

        return take

    def expect_linear(self, layer: str, num_out: int, num_in: int, dtype: torch.dtype) -> Part:
        file, name = self.expect(f"{layer}.weight", (num_out, num_in))
        if not file.is_coded(name):
            return super().expect_linear(layer, num_out, num_in, dtype)
        entry = file.entries[name]
        row_bytes = (entry.end - entry.begin) // num_out
        return GgufWeight(entry.dtype, torch.empty(1, dtype=torch.uint8).expand(num_out, row_bytes))

    def expect_of_experts(
        self, layer: str, num_experts: int, num_out: int, num_in: int, dtype: torch.dtype
    ) -> Part:
        for number in range(num_experts):
            parts = _parts_of_expert(layer, number)
            forms = [self.expect_linear(part, num_out // len(parts), num_in, dtype) for part in parts]
        return _alternating(layer, forms)


def _parts_of_expert(layer: str, number: int) -> list[str]:
    """Returns the file's layers of one expert in a layer of all experts."""
    prefix, _, part = layer.rpartition(".")
    return [f"{prefix}.{number}.{each}" for each in _PARTS_OF.get(part, (part,))]


def _stored_parts(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the file's tensors that make this one, with their shapes: several if it is a bias of all experts."""
    if ".experts." not in name or not name.endswith(_BIAS_OF_ALL):
        return [(name, shape)]
    layer, (num_experts, num_out) = name.removesuffix(_BIAS_OF_ALL), shape
    parts = [_parts_of_expert(layer, number) for number in range(num_experts)]
    return [(f"{part}.bias", (num_out // len(each),)) for each in parts for part in each]


def _alternating(layer: str, parts: list[Part]) -> Part:
    """Joins weights so that their outputs alternate."""
    if len(parts) == 1:
        return parts[0]
    plain = [part for part in parts if isinstance(part, torch.Tensor)]
    coded = [part for part in parts if isinstance(part, GgufWeight)]
    if len(plain) == len(parts):
        return torch.stack(plain, dim=1).flatten(0, 1)
    types = [part.type for part in coded]
    if len(coded) < len(parts) or len(set(types)) > 1:
        raise ValueError(f"{layer}: the types of an expert's gates and ups differ: {', '.join(types)}")
    return GgufWeight(types[0], torch.stack([part.data for part in coded], dim=1).flatten(0, 1))
