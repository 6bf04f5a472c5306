"""The sources of a model's tensors. A model asks by name and shape; the source checks and delivers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from tqdm import tqdm

from alignedserve.models.heap import return_free_pages
from alignedserve.models.mapped_file import MappedFile
from alignedserve.ops.quantise import Part

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


File = TypeVar("File", bound=MappedFile)


class CheckpointSource(ABC, Generic[File]):
    """The tensors in mapped files.

    Beside the model, only the pages read since the last `take` are resident. A tensor taken earlier stays valid:
    reading it again fetches it from the file.
    """

    def __init__(
        self,
        directory: Path,
        file_of: dict[str, File],
        dtype: torch.dtype,
        device: torch.device | str,
        progress: bool = True,
    ) -> None:
        self._directory = directory
        self._dtype = dtype
        self._device = torch.device(device)
        self._file_of = file_of
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
        return self.take(f"{layer}.weight", (num_out, num_in))

    @abstractmethod
    def of_experts(self, layer: str, num_experts: int, num_out: int, num_in: int) -> TakePart: ...

    def expect_linear(self, layer: str, num_out: int, num_in: int, dtype: torch.dtype) -> Part:
        """Returns a weight that takes one value's memory. It counts as taken, and nothing is read. Raises the errors of
        `linear` about names, shapes and dtypes."""
        self.expect(f"{layer}.weight", (num_out, num_in))
        return torch.empty(1, dtype=dtype).expand(num_out, num_in)

    @abstractmethod
    def expect_of_experts(
        self, layer: str, num_experts: int, num_out: int, num_in: int, dtype: torch.dtype
    ) -> Part:
        """Returns the form of each expert's weight; see `expect_linear`."""

    def _count(self, stored_name: str) -> None:
        """Counts a tensor as read."""
        num_bytes = self._num_bytes(stored_name)
        self._bytes_since_trim += num_bytes
        self._bar.update(num_bytes)

    def expect(self, name: str, shape: tuple[int, ...]) -> tuple[File, str]:
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
        return name.endswith(HARMLESS_SUFFIXES) or name.startswith(VISION_PREFIXES)

    def _stored_name(self, name: str) -> str:
        for candidate in spellings(name):
            if candidate in self._file_of:
                return candidate
        raise ValueError(
            f"{self._directory}: tensor {name} is missing; the checkpoint has {len(self._file_of)} tensors: "
            f"{some(self._file_of)}"
        )

    def _convert(self, file: File, name: str, tensor: torch.Tensor) -> torch.Tensor:
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


def spellings(name: str) -> tuple[str, ...]:
    """The possible names of a tensor. Checkpoints of the bare decoder lack the prefix; those of vision models have one
    more."""
    bare = name.removeprefix("model.")
    return name, bare, f"model.{name}", f"language_model.{name}", f"model.language_model.{bare}"


def some(names: Iterable[str], limit: int = 5) -> str:
    """The first few names, as text."""
    names = sorted(names)
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")
