"""The sources of a model's tensors. A model asks by name and shape; the source checks and delivers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch
from tqdm import tqdm

from alignedserve.models.dummy_weights import DummySource
from alignedserve.models.fields import Fields, read_json_object
from alignedserve.models.heap import return_free_pages
from alignedserve.models.quantised.config import QuantisedConfig
from alignedserve.models.quantised.layers import check_expert, check_layer, take_expert, take_layer
from alignedserve.models.quantised.layout import StoredTensor
from alignedserve.models.safetensors_file import SafetensorsFile
from alignedserve.ops.quantise import Part

__all__ = ["DummySource", "SafetensorsSource", "TakePart", "WeightSource"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Bytes of a file that are converted at a time: small beside any model, and large beside a page.
CONVERT_BYTES = 16 << 20
# Bytes taken between two trims of the heap. A trim walks through the whole heap.
TRIM_BYTES = 16 << 20
# Tensors that checkpoints have and no model takes: computed tables, and an output layer tied to the input.
HARMLESS_SUFFIXES = ("rotary_emb.inv_freq", "lm_head.weight", "decoder.version")
# Vision tensors in the checkpoint of a model with only its text part in use.
VISION_PREFIXES = tuple(
    prefix + part for prefix in ("", "model.") for part in ("vision_tower.", "multi_modal_projector.")
)

# Returns one expert's weight by the expert's number.
TakePart = Callable[[int], Part]


class WeightSource(Protocol):
    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns the tensor `name`, in the dtype and on the device that the source was made for.

        Raises ValueError with the tensor's name if it is missing or has another shape. The tensor may be a view of a
        mapped file. It stays valid, but reading it after a later `take` reads the file again.
        """
        ...

    def linear(self, layer: str, num_out: int, num_in: int) -> Part:
        """Returns the weight of the linear layer of this name: like `take`, but quantised if the checkpoint's is."""
        ...

    def of_experts(self, layer: str, num_experts: int, num_out: int, num_in: int) -> TakePart:
        """Returns a function that returns each expert's weight [out, in] of a fused layer. A tensor of this name holds
        all of them, [expert, in, out], or the checkpoint has them quantised."""
        ...

    def finish(self) -> None:
        """Closes files. Raises ValueError if the checkpoint holds tensors that were not taken."""
        ...


class SafetensorsSource:
    """The safetensors of a model directory: one file, or several with an index.

    Beside the model, only the pages read since the last `take` are resident. A tensor taken earlier stays valid:
    reading it again fetches it from the file.
    """

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device | str,
        progress: bool = True,
        quantised: QuantisedConfig | None = None,
    ) -> None:
        self._directory = directory
        self._quantised = quantised
        self._dtype = dtype
        self._device = torch.device(device)
        self._file_of = _open_files(directory)
        self._files = list(dict.fromkeys(self._file_of.values()))
        self._taken: set[str] = set()
        self._bytes_since_trim = 0
        total = sum(self._num_bytes(name) for name in self._file_of)
        self._bar = tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not progress)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self._drop_read()
        file, stored_name = self.expect(name, shape)
        tensor = file.tensor(stored_name)
        self._count(stored_name)
        if tensor.dtype == self._dtype:
            return tensor.to(self._device)
        return self._convert(file, stored_name, tensor)

    def linear(self, layer: str, num_out: int, num_in: int) -> Part:
        if self._quantised is None or not self._quantised.has(layer):
            return self.take(f"{layer}.weight", (num_out, num_in))
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
        """Returns the form of each expert's weight; see `expect_linear`."""
        if self._quantised is not None and self._quantised.has(layer):
            return check_expert(layer, (num_experts, num_out, num_in), self)
        self.expect(layer, (num_experts, num_in, num_out))
        return torch.empty(1, dtype=dtype).expand(num_out, num_in)

    def expect_linear(self, layer: str, num_out: int, num_in: int, dtype: torch.dtype) -> Part:
        """Returns a weight that takes one value's memory. It counts as taken, and nothing is read. Raises the errors of
        `linear` about names, shapes and dtypes."""
        if self._quantised is None or not self._quantised.has(layer):
            self.expect(f"{layer}.weight", (num_out, num_in))
            return torch.empty(1, dtype=dtype).expand(num_out, num_in)
        return check_layer(self._quantised, layer, (num_out, num_in), self)

    def stored_dtype(self, name: str, wanted: StoredTensor) -> torch.dtype | None:
        """See StoredTensors."""
        if wanted.is_optional and not any(each in self._file_of for each in _spellings(name)):
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

    def _count(self, stored_name: str) -> None:
        """Counts a tensor as read."""
        num_bytes = self._num_bytes(stored_name)
        self._bytes_since_trim += num_bytes
        self._bar.update(num_bytes)

    def expect(self, name: str, shape: tuple[int, ...]) -> tuple[SafetensorsFile, str]:
        """Returns the tensor's file and its name there, without reading it. It counts as taken. Raises the errors of
        `take`."""
        stored_name = self._stored_name(name)
        file = self._file_of[stored_name]
        stored_shape = file.entries[stored_name].shape
        if stored_shape != tuple(shape):
            raise ValueError(f"{file.path}: {stored_name} has shape {stored_shape}; must be {tuple(shape)}")
        file.dtype_of(stored_name)
        self._taken.add(stored_name)
        return file, stored_name

    def finish(self) -> None:
        self._drop_read()
        self._bar.close()
        unused = [name for name in self._file_of if name not in self._taken and not self._is_harmless(name)]
        # A file's map lives until the last reference to it is gone.
        self._file_of, self._files = {}, []
        if unused:
            raise ValueError(
                f"{self._directory} holds {len(unused)} tensors that the model does not have: {some(unused)}"
            )

    def _is_harmless(self, name: str) -> bool:
        if name.endswith(HARMLESS_SUFFIXES) or name.startswith(VISION_PREFIXES):
            return True
        if self._quantised is None or not self._quantised.has_empty_biases or not name.endswith(".bias"):
            return False
        return not self._file_of[name].tensor(name).any()

    def _stored_name(self, name: str) -> str:
        for candidate in _spellings(name):
            if candidate in self._file_of:
                return candidate
        raise ValueError(
            f"{self._directory}: tensor {name} is missing; the checkpoint has {len(self._file_of)} tensors: "
            f"{some(self._file_of)}"
        )

    def _convert(self, file: SafetensorsFile, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Converts in pieces and drops their pages at once. Holding a whole tensor in both dtypes would raise the
        peak."""
        converted = torch.empty(tensor.shape, dtype=self._dtype, device=self._device)
        source, target = tensor.reshape(-1), converted.view(-1)
        step = CONVERT_BYTES // tensor.element_size()
        begin = file.entries[name].begin
        for start in range(0, source.numel(), step):
            piece = source[start : start + step]
            target[start : start + step].copy_(piece)
            offset = begin + start * tensor.element_size()
            file.drop(offset, offset + piece.numel() * tensor.element_size())
        return converted

    def _drop_read(self) -> None:
        """Drops the pages of every file, because the model may have read an earlier tensor late, and trims the heap."""
        for file in self._files:
            file.drop()
        if self._bytes_since_trim >= TRIM_BYTES:
            return_free_pages()
            self._bytes_since_trim = 0

    def _num_bytes(self, name: str) -> int:
        entry = self._file_of[name].entries[name]
        return entry.end - entry.begin


def _spellings(name: str) -> tuple[str, ...]:
    """The possible names of a tensor. Checkpoints of the bare decoder lack the prefix; those of vision models have one
    more."""
    bare = name.removeprefix("model.")
    return name, bare, f"model.{name}", f"language_model.{name}", f"model.language_model.{bare}"


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


def some(names: Iterable[str], limit: int = 5) -> str:
    """The first few names, as text."""
    names = sorted(names)
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")
