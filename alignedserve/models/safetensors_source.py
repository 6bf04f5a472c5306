"""The weights of a model directory in safetensors."""

from __future__ import annotations

from pathlib import Path

import torch

from alignedserve.models.fields import Fields, read_json_object
from alignedserve.models.quantised.config import QuantisedConfig
from alignedserve.models.quantised.layers import check_expert, check_layer, take_expert, take_layer
from alignedserve.models.quantised.layout import StoredTensor
from alignedserve.models.safetensors_file import SafetensorsFile
from alignedserve.models.weights import CheckpointSource, TakePart, spellings
from alignedserve.ops.quantise import Part

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class SafetensorsSource(CheckpointSource[SafetensorsFile]):
    """The safetensors of a model directory: one file, or several with an index."""

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device | str,
        progress: bool = True,
        quantised: QuantisedConfig | None = None,
    ) -> None:
        super().__init__(directory, _open_files(directory), dtype, device, progress)
        self._quantised = quantised

    def linear(self, layer: str, num_out: int, num_in: int) -> Part:
        if self._quantised is None or not self._quantised.has(layer):
            return super().linear(layer, num_out, num_in)
        self._drop_read()
        return take_layer(self._quantised, layer, (num_out, num_in), self)

    def of_experts(self, layer: str, num_experts: int, num_out: int, num_in: int) -> TakePart:
        read = self._reader_of_experts(layer, num_experts, num_out, num_in)

        def take(number: int) -> Part:
            # The tensor was counted when it was opened. Copies of its slices are allocated and freed on the heap.
            self._bytes_since_trim += num_out * num_in * self._dtype.itemsize
            self._drop_read()
            return read(number)

        return take

    def _reader_of_experts(self, layer: str, num_experts: int, num_out: int, num_in: int) -> TakePart:
        if self._quantised is not None and self._quantised.has(layer):
            return take_expert(layer, (num_experts, num_out, num_in), self)
        file, name = self.expect(layer, (num_experts, num_in, num_out))
        self._count(name)
        tensor = file.tensor(name)
        return lambda number: tensor[number].to(self._device, self._dtype).T

    def expect_of_experts(
        self, layer: str, num_experts: int, num_out: int, num_in: int, dtype: torch.dtype
    ) -> Part:
        if self._quantised is not None and self._quantised.has(layer):
            return check_expert(layer, (num_experts, num_out, num_in), self)
        self.expect(layer, (num_experts, num_in, num_out))
        return torch.empty(1, dtype=dtype).expand(num_out, num_in)

    def expect_linear(self, layer: str, num_out: int, num_in: int, dtype: torch.dtype) -> Part:
        if self._quantised is None or not self._quantised.has(layer):
            return super().expect_linear(layer, num_out, num_in, dtype)
        return check_layer(self._quantised, layer, (num_out, num_in), self)

    def stored_dtype(self, name: str, wanted: StoredTensor) -> torch.dtype | None:
        """See StoredTensors."""
        if wanted.is_optional and not any(each in self._file_of for each in spellings(name)):
            return None
        stored_name = self._stored_name(name)
        file = self._file_of[stored_name]
        shape = file.entries[stored_name].shape
        if shape not in wanted.shapes:
            must = " or ".join(map(str, wanted.shapes))
            raise ValueError(f"{file.path}: {stored_name} has shape {shape}; must be {must}")
        dtype = file.dtype_of(stored_name, wanted.dtypes)
        self._taken.add(stored_name)
        return dtype

    def take_stored(self, name: str, wanted: StoredTensor) -> torch.Tensor | None:
        """See StoredTensors."""
        if self.stored_dtype(name, wanted) is None:
            return None
        stored_name = self._stored_name(name)
        self._count(stored_name)
        return self._file_of[stored_name].tensor(stored_name)

    def _is_harmless(self, name: str) -> bool:
        if super()._is_harmless(name):
            return True
        if self._quantised is None or not self._quantised.has_empty_biases or not name.endswith(".bias"):
            return False
        return not self._file_of[name].tensor(name).any()


def _open_files(directory: Path) -> dict[str, SafetensorsFile]:
    """Returns the file of each tensor."""
    if (directory / SINGLE_FILE).is_file():
        single = SafetensorsFile(directory / SINGLE_FILE)
        return dict.fromkeys(single.entries, single)
    index_path = directory / INDEX_FILE
    if not index_path.is_file():
        raise ValueError(
            f"{directory} holds no weights: looked for {SINGLE_FILE} and {INDEX_FILE} "
            "(only safetensors are read, never pickled .bin or .pt files)"
        )
    index = Fields(read_json_object(index_path), str(index_path))
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise index.error("weight_map", "an object from tensor names to file names")
    for shard in weight_map.values():
        # An index comes from the network: it must not point outside its directory.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{index_path}: weight_map names the file {shard!r}; must be a plain file name")
    shards = {shard: _open_shard(index_path, shard) for shard in dict.fromkeys(weight_map.values())}
    for name, shard in weight_map.items():
        if name not in shards[shard].entries:
            raise ValueError(
                f"{directory / shard}: tensor {name} is missing; {INDEX_FILE} says that it is there"
            )
    return {name: shards[shard] for name, shard in weight_map.items()}


def _open_shard(index_path: Path, shard: str) -> SafetensorsFile:
    path = index_path.parent / shard
    if not path.is_file():
        raise ValueError(f"{path} is missing; {index_path.name} lists it among the checkpoint's files")
    return SafetensorsFile(path)
