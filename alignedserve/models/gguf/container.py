"""The header of a GGUF file. Needs no torch.

A file is: magic, version, number of tensors, number of keys; each key with its type and value; each tensor's name,
dimensions, type and offset; padding; data. Numbers are little-endian. A tensor's innermost dimension comes first.

We read it ourselves. The `gguf` package makes an array of each string, which takes 20 s and 900 MB for a vocabulary of
262,144 tokens, and it believes every count.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alignedserve.models.fields import shown
from alignedserve.models.file_map import TensorEntry, map_file
from alignedserve.models.gguf.names import CONFIG_TENSORS

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Magic, version and two counts.
FIXED_BYTES = 24
# Headers of large vocabularies have 20 MB, with 600,000 merges.
MAX_HEADER_BYTES = 1 << 28
MAX_STRINGS = 1 << 22
MAX_NAME_BYTES = 1 << 16
# Keys, and tensors.
MAX_ENTRIES = 1 << 16
MAX_DIMENSIONS = 4
# Factors of the rotary embedding: one for two values of a head.
MAX_FACTORS = 4096
DEFAULT_ALIGNMENT = 32


class Type(NamedTuple):
    """A type of tensors."""

    name: str
    # Values and bytes of a block. Rows are whole blocks.
    values: int = 1
    num_bytes: int = 0


TYPES = {
    0: Type("F32", 1, 4),
    1: Type("F16", 1, 2),
    2: Type("Q4_0", 32, 18),
    3: Type("Q4_1", 32, 20),
    6: Type("Q5_0", 32, 22),
    7: Type("Q5_1", 32, 24),
    8: Type("Q8_0", 32, 34),
    10: Type("Q2_K", 256, 84),
    11: Type("Q3_K", 256, 110),
    12: Type("Q4_K", 256, 144),
    13: Type("Q5_K", 256, 176),
    14: Type("Q6_K", 256, 210),
    20: Type("IQ4_NL", 32, 18),
    23: Type("IQ4_XS", 256, 136),
    30: Type("BF16", 1, 2),
    39: Type("MXFP4", 32, 17),
}
# Types that other programs write, by number.
OTHER_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
FLOAT_TYPES = ("F32", "F16", "BF16")

# Types of keys' values.
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Header:
    path: Path
    # Strings, numbers, flags, lists of strings, and numpy arrays of the others.
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    # The values of CONFIG_TENSORS.
    factors: dict[str, list[float]] = field(default_factory=dict)

    def numbers(self, key: str, count: int) -> Any:
        """Returns the array of this key; None if there is none. Raises ValueError if it has not this many numbers."""
        found = self.metadata.get(key)
        if found is None or (isinstance(found, np.ndarray) and len(found) == count):
            return found
        has = f"{len(found)} entries" if isinstance(found, np.ndarray | list) else shown(found)
        raise ValueError(f"{self.path}: {key} has {has}; must have {count} numbers")


def read_header(path: Path) -> Header:
    """Raises ValueError with the key or tensor if the file is cut, or contradicts itself."""
    mapped = map_file(path, FIXED_BYTES)
    try:
        return _Reader(path, mapped).header()
    finally:
        mapped.close()


class _Reader:
    def __init__(self, path: Path, mapped: Any) -> None:
        self._path = path
        self._map = mapped
        self._size = len(mapped)
        self._at = 0

    def header(self) -> Header:
        if self._map[:4] != MAGIC:
            raise self._error(f"begins with {self._map[:4]!r}; must be {MAGIC!r}: not a GGUF file")
        version, num_tensors, num_keys = struct.unpack_from("<IQQ", self._map, 4)
        if version not in VERSIONS:
            order = ", which is big-endian" if version & 0xFFFF == 0 else ""
            must = " or ".join(map(str, VERSIONS))
            raise self._error(f"has version {version}{order}; must be {must}, little-endian")
        self._at = FIXED_BYTES
        self._check_count("keys", num_keys, least_bytes=13)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._name("a key")
            if key in metadata:
                raise self._error(f"has the key {key} twice")
            metadata[key] = self._value(key, self._number("<I", key))
        self._check_count("tensors", num_tensors, least_bytes=32)
        stored = [self._tensor() for _ in range(num_tensors)]
        tensors = self._placed(stored, self._alignment(metadata))
        factors = {name: self._factors(name, tensors[name]) for name in CONFIG_TENSORS if name in tensors}
        return Header(self._path, metadata, tensors, factors)

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text(key, MAX_HEADER_BYTES)
        if kind == _ARRAY:
            return self._array(key, self._number("<I", key), self._number("<Q", key))
        if kind not in _SCALARS:
            raise self._error(f"{key} has values with type {kind}, which does not exist")
        dtype = np.dtype(_SCALARS[kind])
        value = np.frombuffer(self._bytes(dtype.itemsize, key), dtype)[0]
        return _shortest(value) if dtype == np.float32 else value.item()

    def _array(self, key: str, kind: int, count: int) -> Any:
        if kind == _STRING:
            if count > MAX_STRINGS:
                raise self._error(f"{key} has {count} strings; must be at most {MAX_STRINGS}")
            return [self._text(key, MAX_NAME_BYTES) for _ in range(count)]
        if kind not in _SCALARS:
            raise self._error(f"{key} is an array of type {kind}; must be one of strings, numbers or flags")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._bytes(count * dtype.itemsize, key), dtype)

    def _tensor(self) -> tuple[str, TensorEntry]:
        """Returns a tensor. Its bytes are counted from the start of the data."""
        name = self._name("a tensor's name")
        num_dimensions = self._number("<I", name)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(f"{name} has {num_dimensions} dimensions; must have 1 to {MAX_DIMENSIONS}")
        shape = tuple(reversed([self._number("<Q", name) for _ in range(num_dimensions)]))
        kind, offset = self._number("<I", name), self._number("<Q", name)
        if kind not in TYPES:
            known = ", ".join(each.name for each in TYPES.values())
            raise self._error(
                f"{name} has type {OTHER_TYPES.get(kind, kind)}, which is not supported; must be one of {known}"
            )
        stored = TYPES[kind]
        if 0 in shape or shape[-1] % stored.values:
            must = f"; rows of {stored.name} must be whole blocks of {stored.values}"
            raise self._error(f"{name} has shape {shape}" + (must if 0 not in shape else ", which is empty"))
        num_bytes = math.prod(shape) // stored.values * stored.num_bytes
        return name, TensorEntry(stored.name, shape, offset, offset + num_bytes)

    def _placed(self, stored: list[tuple[str, TensorEntry]], alignment: int) -> dict[str, TensorEntry]:
        """Returns the tensors in the order of their bytes, counted from the start of the file."""
        data_begin = -(-self._at // alignment) * alignment
        placed: dict[str, TensorEntry] = {}
        end = data_begin
        for name, entry in sorted(stored, key=lambda each: (each[1].begin, each[1].end)):
            begin = data_begin + entry.begin
            if name in placed:
                raise self._error(f"has the tensor {name} twice")
            if entry.begin % alignment:
                raise self._error(f"{name} has offset {entry.begin}; must be a multiple of {alignment}")
            if begin < end:
                raise self._error(f"{name} begins at byte {begin} and overlaps the tensor before it")
            end = data_begin + entry.end
            if end > self._size:
                raise self._error(f"is truncated: {name} ends at byte {end}, the file at {self._size}")
            placed[name] = TensorEntry(entry.dtype, entry.shape, begin, end)
        return placed

    def _factors(self, name: str, entry: TensorEntry) -> list[float]:
        if entry.dtype != "F32" or len(entry.shape) != 1 or entry.shape[0] > MAX_FACTORS:
            raise self._error(
                f"{name} has type {entry.dtype} and shape {entry.shape}; must be F32, at most {MAX_FACTORS} in a row"
            )
        return [_shortest(value) for value in np.frombuffer(self._map[entry.begin : entry.end], "<f4")]

    def _alignment(self, metadata: dict[str, Any]) -> int:
        found = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(found) is not int or not 1 <= found <= 1 << 20 or found & (found - 1):
            raise self._error(f"general.alignment is {shown(found)}; must be a power of two")
        return found

    def _check_count(self, what: str, count: int, least_bytes: int) -> None:
        most = (min(self._size, MAX_HEADER_BYTES) - self._at) // least_bytes
        if count > most:
            raise self._error(f"has {count} {what}, and space for {most}: it is truncated or damaged")
        if count > MAX_ENTRIES:
            raise self._error(f"has {count} {what}; must be at most {MAX_ENTRIES}")

    def _name(self, what: str) -> str:
        name = self._text(what, MAX_NAME_BYTES)
        if not name or not name.isprintable():
            raise self._error(f"{what} is {name[:80]!r}; must be printable")
        return name

    def _text(self, what: str, max_bytes: int) -> str:
        length = self._number("<Q", what)
        if length > max_bytes:
            raise self._error(f"{what} has {length} bytes; must have at most {max_bytes}")
        try:
            return str(self._bytes(length, what), "utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8: {error}") from None

    def _number(self, form: str, what: str) -> int:
        return int(struct.unpack(form, self._bytes(struct.calcsize(form), what))[0])

    def _bytes(self, count: int, what: str) -> bytes:
        begin, self._at = self._at, self._at + count
        if self._at > self._size:
            raise self._error(f"is truncated: {what} ends at byte {self._at}, the file at {self._size}")
        if self._at > MAX_HEADER_BYTES:
            raise self._error(f"has a header of more than {MAX_HEADER_BYTES} bytes, at {what}")
        found: bytes = self._map[begin : self._at]
        return found

    def _error(self, text: str) -> ValueError:
        return ValueError(f"{self._path}: {text}")


def _shortest(value: np.float32) -> float:
    """Returns the shortest decimal, which is what was meant: 1e-05, not 9.999999747378752e-06."""
    return float(str(value))


def types_of(entries: Iterable[TensorEntry]) -> list[str]:
    """The types among these tensors, those of the most bytes first."""
    num_bytes: dict[str, int] = {}
    for entry in entries:
        num_bytes[entry.dtype] = num_bytes.get(entry.dtype, 0) + entry.end - entry.begin
    return sorted(num_bytes, key=lambda each: (-num_bytes[each], each))
