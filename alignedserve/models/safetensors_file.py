"""One safetensors file, mapped into memory.

A file is: header length (8 bytes, little-endian), header (JSON: name → dtype, shape, data_offsets), data. We read it
without the safetensors library because of `drop`. The library maps the file, too, but can't release pages before it is
closed, so a loaded model and its file would be resident together.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from alignedserve.models.file_map import TensorEntry, map_file
from alignedserve.models.mapped_file import MappedFile

LENGTH_BYTES = 8
# The limit of the safetensors library.
MAX_HEADER_BYTES = 100_000_000
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Quantised checkpoints have these, too.
STORED_DTYPES = DTYPES | {
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class SafetensorsFile(MappedFile):
    def __init__(self, path: Path) -> None:
        """Raises ValueError if the file can't be read, or does not match its header exactly."""
        mapped = map_file(path, LENGTH_BYTES)
        super().__init__(path, mapped, {})
        self.entries = self._read_header(len(mapped))

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a view of the mapped file. It must not be written to."""
        return self.stored_values(name, self.dtype_of(name, tuple(STORED_DTYPES)))

    def dtype_of(self, name: str, allowed: tuple[str, ...] = tuple(DTYPES)) -> torch.dtype:
        """Returns the tensor's dtype. Raises ValueError if it is not in `allowed`, by default the floating-point
        ones."""
        found = self.entries[name].dtype
        if found not in allowed:
            raise ValueError(f"{self.path}: {name} has dtype {found}; must be one of {', '.join(allowed)}")
        return STORED_DTYPES[found]

    def _read_header(self, size: int) -> dict[str, TensorEntry]:
        header_bytes = int.from_bytes(self._map[:LENGTH_BYTES], "little")
        data_begin = LENGTH_BYTES + header_bytes
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(
                f"{self.path}: header length is {header_bytes}; must be at most {MAX_HEADER_BYTES}: "
                "not a safetensors file"
            )
        if data_begin > size:
            raise ValueError(
                f"{self.path} is truncated: its header ends at {data_begin}, the file at {size} bytes"
            )
        try:
            header = json.loads(self._map[LENGTH_BYTES:data_begin]).items()
        except (ValueError, RecursionError, AttributeError) as error:
            raise ValueError(f"{self.path}: its header is not a JSON object: {error}") from error
        entries = {
            name: self._entry(name, fields, data_begin) for name, fields in header if name != "__metadata__"
        }
        self._check_layout(entries, data_begin, size)
        return entries

    def _entry(self, name: str, fields: Any, data_begin: int) -> TensorEntry:
        try:
            shape, (begin, end) = fields["shape"], fields["data_offsets"]
            numbers = [begin, end, *shape]
            dtype = str(fields["dtype"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.path}: header entry {name} is {fields!r}; must have dtype, shape and data_offsets"
            ) from error
        if any(type(number) is not int or number < 0 for number in numbers) or end < begin:
            raise ValueError(
                f"{self.path}: {name} has shape {shape} and data_offsets {[begin, end]}; "
                "must be integers of at least 0, in order"
            )
        if dtype in STORED_DTYPES and end - begin != math.prod(shape) * STORED_DTYPES[dtype].itemsize:
            raise ValueError(
                f"{self.path}: {name} has {end - begin} bytes; "
                f"{dtype} of shape {tuple(shape)} must have {math.prod(shape) * STORED_DTYPES[dtype].itemsize}"
            )
        return TensorEntry(dtype, tuple(shape), data_begin + begin, data_begin + end)

    def _check_layout(self, entries: dict[str, TensorEntry], data_begin: int, size: int) -> None:
        """Raises ValueError unless tensors lie end to end, without gaps or overlaps, and fill the file, as the format
        demands."""
        end = data_begin
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != end:
                fault = "overlaps the tensor before it" if entry.begin < end else "leaves a gap before it"
                raise ValueError(
                    f"{self.path}: {name} begins at byte {entry.begin} and {fault}; must be {end}"
                )
            end = entry.end
        if end != size:
            fault = "is truncated" if size < end else "has bytes that no tensor owns"
            raise ValueError(f"{self.path} {fault}: its header describes {end} bytes, the file has {size}")
