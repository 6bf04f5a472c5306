"""A native library for another processor, with its functions run in an emulator.

A call copies the tensors that its arguments point to into a file. Their pointers are set to where `call.cpp` will map
the file, and afterwards its content is copied back. As a pytest plugin (`-p tests.kernels.arm.emulated`) this replaces
the native library in all tests. $EMULATED_LIBRARY is the command that runs `call.cpp` with the library. With
$EMULATED_TESTS="3 8" one test in eight runs, from number 3 on.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from ctypes import Structure, c_char, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.kernels.cpu import arena, library
from alignedserve.kernels.cpu.program import field_of
from alignedserve.kernels.cpu.structs import KvBlocks, Op, OpKind, Step

# An address that neither the emulator nor the emulated program uses.
ADDRESS = 1 << 40
PAGE = 4096


class Call(Structure):
    """The struct of the same name in call.cpp."""

    _fields_ = [
        ("address", c_uint64),
        ("function", c_char * 64),
        ("args", c_int64 * 9),
        ("result", c_int64),
    ]


# Structs that arguments point to, by function and position.
STRUCTS: dict[tuple[str, int], type[Structure]] = {
    ("run_program", 0): Op,
    ("run_program", 2): Step,
    ("quantise_kv", 0): KvBlocks,
    ("dequantise_kv", 0): KvBlocks,
}


class EmulatedLibrary:
    """Behaves like a library loaded by ctypes, as far as `structs.declare` and callers can tell."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)

    def __getattr__(self, name: str) -> Function:
        function = Function(name, self.run)
        setattr(self, name, function)
        return function

    def run(self, path: str) -> None:
        """Makes the call described in the file."""
        pipes = self.process.stdin, self.process.stdout
        assert pipes[0] and pipes[1]
        print(path, file=pipes[0], flush=True)
        if pipes[1].readline() != "done\n":
            raise RuntimeError(f"the emulator ended with {self.process.wait()}")


class Function:
    argtypes: tuple[Any, ...] = ()
    restype: Any = None

    def __init__(self, name: str, run: Callable[[str], None]) -> None:
        self.name, self.run = name, run

    def __call__(self, *args: Any) -> Any:
        memory = Memory()
        call = Call(address=ADDRESS, function=self.name.encode())
        memory.place(bytes(call))
        for i, (kind, arg) in enumerate(zip(self.argtypes, args, strict=True)):
            call.args[i] = self._argument(memory, i, arg) if kind is c_void_p else arg
        call.result = memory.run(call, self.run)
        return None if self.restype is None else self.restype(call.result).value

    def _argument(self, memory: Memory, i: int, arg: Any) -> int:
        kind = STRUCTS.get((self.name, i))
        if kind is None:
            return memory.moved(arg, f"argument {i} of {self.name}")
        arg = getattr(arg, "_obj", arg)
        structs = (
            arg
            if isinstance(arg, ctypes.Array)
            else [arg if isinstance(arg, kind) else kind.from_address(arg)]
        )
        copies = [type(each).from_buffer_copy(each) for each in structs]
        for copy in copies:
            for struct, name in pointers(copy):
                setattr(struct, name, memory.moved(getattr(struct, name), f"{type(struct).__name__}.{name}"))
        return memory.place(b"".join(map(bytes, copies)))


def pointers(struct: Structure) -> Iterator[tuple[Structure, str]]:
    """Yields the fields that hold pointers, including those in nested structs."""
    for name, kind in struct._fields_:  # type: ignore[misc]
        if isinstance(struct, Op) and name == "args":
            yield from pointers(getattr(struct.args, field_of(OpKind(struct.kind))))
        elif kind is c_void_p:
            yield struct, name
        elif issubclass(kind, Structure):
            yield from pointers(getattr(struct, name))


class Memory:
    """The memory that a call sees: copies of whole tensor storages, and structs."""

    def __init__(self) -> None:
        self.storages = {
            storage.data_ptr(): storage
            for tensor in gc.get_objects()
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
            for storage in [tensor.untyped_storage()]
        }
        # By their positions in the file.
        self.pieces: dict[int, bytes | torch.UntypedStorage] = {}
        self.places: dict[int, int] = {}
        self.size = 0

    def place(self, piece: bytes | torch.UntypedStorage) -> int:
        """Returns the address that it will have."""
        at, num_bytes = self.size, len(piece) if isinstance(piece, bytes) else piece.nbytes()
        self.pieces[at] = piece
        self.size += -(-num_bytes // PAGE) * PAGE
        return ADDRESS + at

    def moved(self, pointer: int | None, name: str) -> int:
        """Returns the address that the memory at `pointer` will have."""
        if not pointer:
            return 0
        for begin, storage in self.storages.items():
            if begin <= pointer < begin + storage.nbytes():
                if begin not in self.places:
                    # Addresses keep their offset within a page.
                    self.size += begin % PAGE
                    self.places[begin] = self.place(storage)
                    self.size = -(-self.size // PAGE) * PAGE
                return int(self.places[begin] + pointer - begin)
        raise ValueError(f"{name} points to no tensor")

    def run(self, call: Call, run: Callable[[str], None]) -> int:
        """Returns the function's result."""
        self.pieces[0] = bytes(call)
        with tempfile.NamedTemporaryFile() as file:
            file.truncate(self.size)
            with mmap.mmap(file.fileno(), self.size) as mapped:
                begin = ctypes.addressof(c_char.from_buffer(mapped))
                for at, piece in self.pieces.items():
                    if isinstance(piece, bytes):
                        ctypes.memmove(begin + at, piece, len(piece))
                    else:
                        ctypes.memmove(begin + at, piece.data_ptr(), piece.nbytes())
                run(file.name)
                for at, piece in self.pieces.items():
                    if not isinstance(piece, bytes):
                        ctypes.memmove(piece.data_ptr(), begin + at, piece.nbytes())
                return int(Call.from_buffer_copy(mapped).result)


def pytest_configure() -> None:
    emulated = EmulatedLibrary(shlex.split(os.environ["EMULATED_LIBRARY"]))
    library._load = lambda: library.LoadedLibrary(emulated, Path())  # type: ignore[arg-type]
    # Each call copies a whole arena, so arenas are kept small. It also examines all objects except the frozen ones.
    arena._CHUNK = 0
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first, every = map(int, os.environ.get("EMULATED_TESTS", "0 1").split())
    items[:] = items[first::every]
