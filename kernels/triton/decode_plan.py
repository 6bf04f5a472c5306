"""Which program of the decode attention reads which keys: made once a step, used by every layer.

A sequence's keys are cut into tiles; a unit of work is one tile of one KV head of one sequence. In the order
(sequence, head, tile) the units are one long line, and every program gets an equal piece of it, so that the whole
device reads as fast as it can whatever the lengths are. Sequences that compute more than one token, and padding
(context_len 0), have no tiles.

plan, int32: [units per program, units in all, -, -,
              where each program begins, 8 numbers of each: sequence, its first tile, its tiles, its length, its token, -,
              first tile of each sequence, and the end: num_seqs + 1]

Grid: (num_programs / 32,); every program sums up the sequences again, that is quicker than waiting.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.launch import dependent_launch, wait_for_dependency

HEADER = 4
RECORD = 8
PROGRAMS_PER_BLOCK = 32
# Less would be mostly starting up, and adding up.
MIN_KEYS_PER_PROGRAM = 128


def plan_size(num_seqs: int, num_programs: int) -> int:
    return HEADER + RECORD * num_programs + num_seqs + 1


def make_plan(
    plan: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    num_seqs: int,
    num_kv_heads: int,
    num_programs: int,
    tile: int,
    window: int | None,
) -> None:
    """Fills `plan`. `num_seqs` counts padding too; the plan is laid out for it."""
    if plan.numel() < plan_size(num_seqs, num_programs):
        raise ValueError(f"plan holds {plan.numel()} numbers, needs {plan_size(num_seqs, num_programs)}")
    _plan_kernel[(triton.cdiv(num_programs, PROGRAMS_PER_BLOCK),)](
        plan,
        query_start,
        context_len,
        num_seqs,
        NUM_KV_HEADS=num_kv_heads,
        NUM_PROGRAMS=num_programs,
        TILE=tile,
        WINDOW=window or 0,
        FLOOR=max(1, MIN_KEYS_PER_PROGRAM // tile),
        SEQS=triton.next_power_of_2(num_seqs),
        num_warps=4,
        **dependent_launch(),
    )


@triton.jit(do_not_specialize=["num_seqs"])
def _plan_kernel(
    plan,
    query_start,
    context_len,
    num_seqs,
    NUM_KV_HEADS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    FLOOR: tl.constexpr,
    SEQS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_dependency(PDL)
    seq = tl.arange(0, SEQS)
    is_seq = seq < num_seqs
    length = tl.load(context_len + seq, mask=is_seq, other=0)
    begin = tl.load(query_start + seq, mask=is_seq, other=0)
    end = tl.load(query_start + seq + 1, mask=is_seq, other=0)
    num_tiles = (length + TILE - 1) // TILE
    if WINDOW > 0:
        num_tiles -= tl.maximum(length - WINDOW, 0) // TILE
    num_tiles = tl.where(is_seq & (end - begin == 1) & (length > 0), num_tiles, 0)
    tiles_end = tl.cumsum(num_tiles, 0)
    total = tl.sum(num_tiles, 0) * NUM_KV_HEADS
    per_program = tl.maximum((total + NUM_PROGRAMS - 1) // NUM_PROGRAMS, FLOOR)

    block = tl.program_id(0)
    if block == 0:
        starts = plan + 4 + 8 * NUM_PROGRAMS
        tl.store(plan, per_program)
        tl.store(plan + 1, total)
        tl.store(starts, 0)
        tl.store(starts + 1 + seq, tiles_end, mask=is_seq)
    # the sequence of a program's first unit comes after all that end at or before that unit
    program = block * 32 + tl.arange(0, 32)
    first_unit = program * per_program
    is_before = ((tiles_end * NUM_KV_HEADS)[None, :] <= first_unit[:, None]) & is_seq[None, :]
    first_seq = tl.sum(is_before.to(tl.int32), 1)
    is_first = seq[None, :] == first_seq[:, None]
    record = plan + 4 + 8 * program
    mask = (program < NUM_PROGRAMS) & (first_unit < total)
    tl.store(record, first_seq, mask=mask)
    tl.store(record + 1, tl.sum(tl.where(is_first, (tiles_end - num_tiles)[None, :], 0), 1), mask=mask)
    tl.store(record + 2, tl.sum(tl.where(is_first, num_tiles[None, :], 0), 1), mask=mask)
    tl.store(record + 3, tl.sum(tl.where(is_first, length[None, :], 0), 1), mask=mask)
    tl.store(record + 4, tl.sum(tl.where(is_first, begin[None, :], 0), 1), mask=mask)


def make_plan_torch(
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    num_kv_heads: int,
    num_programs: int,
    tile: int,
    window: int | None,
) -> torch.Tensor:
    length = context_len.long()
    num_tiles = (length + tile - 1) // tile
    if window:
        num_tiles -= (length - window).clamp(min=0) // tile
    num_tiles = torch.where((query_start.diff() == 1) & (length > 0), num_tiles, 0)
    ends = num_tiles.cumsum(0)
    total = int(ends[-1]) * num_kv_heads
    per_program = max(-(-total // num_programs), MIN_KEYS_PER_PROGRAM // tile, 1)
    records = torch.zeros(num_programs, RECORD, dtype=torch.long)
    for program, first_unit in enumerate(range(0, total, per_program)):
        seq = int((ends * num_kv_heads <= first_unit).sum())
        first_tile = ends[seq] - num_tiles[seq]
        records[program, :5] = torch.tensor(
            [seq, first_tile, num_tiles[seq], length[seq], query_start[seq]]
        )
    head = torch.tensor([per_program, total, 0, 0])
    return torch.cat([head, records.flatten(), torch.zeros(1, dtype=torch.long), ends]).int()
