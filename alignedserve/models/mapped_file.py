"""A file of tensors, mapped into memory. Its pages can be released while it is open."""

from __future__ import annotations

import mmap
import warnings
from abc import ABC, abstractmethod
from pathlib import Path

import torch

from alignedserve.models.file_map import TensorEntry


class MappedFile(ABC):
    """The map lives until the last reference to this object or to one of its tensors is gone.

    There is no `close`: torch's views keep the map object alive, but not open, and would read unmapped memory.
    """

    def __init__(self, path: Path, mapped: mmap.mmap, entries: dict[str, TensorEntry]) -> None:
        self.path = path
        self.entries = entries
        self._map = mapped

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """Returns the tensor, possibly as a view of the file. It must not be written to."""

    @abstractmethod
    def dtype_of(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor's values. Raises ValueError if they are not in floating point."""

    def stored_bytes(self, name: str) -> torch.Tensor:
        """Returns a view of the tensor's bytes in the file. It must not be written to."""
        entry = self.entries[name]
        if entry.begin == entry.end:
            return torch.empty(0, dtype=torch.uint8)
        self._advise(entry.begin, entry.end, "MADV_WILLNEED")
        with warnings.catch_warnings():
            # torch warns that the map is read-only.
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(
                self._map, dtype=torch.uint8, count=entry.end - entry.begin, offset=entry.begin
            )

    def stored_values(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Returns a view of the tensor in the file, or a copy if its values are not aligned there."""
        raw = self.stored_bytes(name)
        if self.entries[name].begin % dtype.itemsize:
            # torch's kernels expect it.
            raw = raw.clone()
        return raw.view(dtype).view(self.entries[name].shape)

    def drop(self, begin: int = 0, end: int | None = None) -> None:
        """Releases the pages of these bytes. They may be read again, which fetches them anew."""
        self._advise(begin, len(self._map) if end is None else end, "MADV_DONTNEED")

    def _advise(self, begin: int, end: int, advice: str) -> None:
        # Not every platform has it.
        if hasattr(mmap, advice):
            start = begin // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(getattr(mmap, advice), start, end - start)
