"""Which keys decoding sequences have in common, for `shared_attention.py`. Made on the host once per step, and used by
every layer with the same block tables, heads and window.

Tasks and their segments are those that CPUs have (kernels/cpu/csrc/shared_tasks.h): adjacent sequences of a tree of
common prefixes, at most as many as a program has rows for. A unit of work is one tile of a task for one KV head. The
units form one long line in the order (task, head, tile), and every program gets an equal part of it.

All numbers are int32, in one buffer that keeps its address and its size, so that CUDA graphs can read it:

    header       numbers in the buffer, units per program, units in all
    row_of_seq   4 numbers of each sequence: the first key that it reads alone, its task or -1, its row there, -
    programs     the first and the last task and KV head of each program, as task * num_kv_heads + head
    tasks        8 numbers: first row, rows, tiles of the tasks before it, tiles, first segment, end of segments, -, -
    segments     8 numbers: first tile, tiles, first row, rows, tiles of the task's segments before it, -, -, -
    rows         the sequence of each row
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from alignedserve.kernels.cpu.library import library
from alignedserve.kernels.cpu.structs import SharedLimits, Step
from alignedserve.kernels.triton.host_copy import receive

# Segments are multiples of this many keys: kTileKeys of kernels/cpu/csrc/key_tile.h.
CPU_TILE = 64
# A task and a head are divided among at most this many programs, because each row adds up their parts.
MAX_PARTS = 16
# A part is written and read again. With G query heads per KV head, each row of it costs as many bytes as 2 G keys. Two
# rows with this many keys in common save half of them each, so parts pay with up to 32 heads.
MIN_KEYS_PER_PROGRAM = 256
# Keys that a task must save on average. The parts at its two ends may be short, and this is what they cost with up to
# 32 heads.
MIN_SAVED_PER_ROW = 128
# Bytes of KV that a layer must save. A launch more takes about 5 us, in which an H100 reads as much. Not measured.
MIN_SAVED_BYTES = 16 << 20


@dataclass(frozen=True)
class SharedForm:
    """What the plan depends on, beside the step."""

    num_kv_heads: int
    # Query rows of a program, and query heads that share a KV head.
    program_rows: int
    heads_per_kv: int
    # Keys per block of KV, and per tile: a power of two up to 64.
    block_size: int
    tile: int
    window: int | None
    # Bytes of a token's K and V for all heads.
    token_bytes: int

    @property
    def max_rows(self) -> int:
        """Returns the number of sequences in a task. With fewer than two, nothing can be shared."""
        return self.program_rows // self.heads_per_kv

    def limits(self) -> SharedLimits:
        return SharedLimits(
            self.block_size,
            self.tile,
            self.window or 0,
            self.max_rows,
            MIN_SAVED_PER_ROW,
            -(-MIN_SAVED_BYTES // self.token_bytes),
        )


class SharedPlan:
    def __init__(self, form: SharedForm, max_seqs: int, num_programs: int, device: torch.device) -> None:
        if form.max_rows < 2:
            raise ValueError(
                f"heads_per_kv={form.heads_per_kv}: two sequences need {2 * form.heads_per_kv} rows"
            )
        if form.tile < 1 or CPU_TILE % form.tile:
            raise ValueError(f"tile={form.tile}: must divide {CPU_TILE}")
        self.form, self.num_programs, self._max_seqs = form, num_programs, max_seqs
        self._limits = form.limits()
        sizes = {
            "header": 4,
            "row_of_seq": 4 * max_seqs,
            "programs": 2 * num_programs,
            "tasks": 8 * max_seqs,
            "segments": 8 * max_seqs,
            "rows": max_seqs,
        }
        # Kernels are compiled for addresses that are multiples of 16 bytes.
        places, end = {}, 0
        for name, size in sizes.items():
            places[name] = slice(end, end + size)
            end += -(-size // 4) * 4
        self._host = torch.zeros(end, dtype=torch.int32, pin_memory=device.type == "cuda")
        host = {name: self._host[place].numpy() for name, place in places.items()}
        self._header, self._programs = host["header"], host["programs"].reshape(2, -1)
        self._row_of_seq, self._tasks = host["row_of_seq"].reshape(-1, 4), host["tasks"].reshape(-1, 8)
        # The native function fills in these.
        names = ("tasks", "segments", "rows", "row_of_seq")
        self._pointers = [ctypes.c_void_p(host[name].ctypes.data) for name in names]
        self.clear()
        self._device = self._host.to(device, copy=True)
        self.header, self.row_of_seq, self.programs, self.tasks, self.segments, self.rows = (
            self._device[place] for place in places.values()
        )

    def clear(self) -> None:
        """Makes the plan of a step in which no keys are shared."""
        self._fill(0)
        self._row_of_seq[:] = (0, -1, 0, 0)

    def fill(self, step: Step) -> None:
        """Makes the plan of a step from its buffers on the host. They are contiguous int32, and the blocks of sequence
        s begin at s * block_table_stride."""
        num_tasks = library().shared_tasks(ctypes.byref(step), ctypes.byref(self._limits), *self._pointers)
        self._row_of_seq[step.num_seqs :] = (0, -1, 0, 0)
        self._fill(num_tasks)

    def _fill(self, num_tasks: int) -> None:
        tiles = self._tasks[:num_tasks, 3]
        total = int(tiles.sum()) * self.form.num_kv_heads
        per_program = max(
            -(-total // self.num_programs),
            -(-int(tiles.max(initial=0)) // (MAX_PARTS - 1)),
            max(1, MIN_KEYS_PER_PROGRAM // self.form.tile),
        )
        self._header[:3] = len(self._host), per_program, total
        # A unit belongs to the task and head after all those that end at or before it.
        ends = np.cumsum(np.repeat(tiles, self.form.num_kv_heads))
        first_unit = np.arange(self.num_programs) * per_program
        last_unit = np.minimum(first_unit + per_program, total) - 1
        self._programs[0] = np.searchsorted(ends, first_unit, side="right")
        # Programs without units have no items.
        self._programs[1] = np.where(
            first_unit <= last_unit, np.searchsorted(ends, last_unit, side="right"), -1
        )

    def upload(self) -> None:
        """Sends the plan to the device, on the current stream. This can be captured. The plan must not be made again
        until it is sent."""
        receive(self._host, self._device)
