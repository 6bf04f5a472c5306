"""Which program of the decode attention reads which keys. Made once per step, and used by every layer.

A sequence's keys are cut into tiles. A unit of work is one tile of one KV head of one sequence. The units form one long
line in the order (sequence, head, tile), and every program gets an equal part of it. The whole device therefore reads
at full speed, for any lengths. Sequences that compute more than one token, and padding (context_len 0), have no tiles.

plan, int32: [units per program, units in all, -, -,
              sequences with tiles, 8 numbers of each: sequence, tiles before it, tiles, length, token, first tile, -:
              num_seqs,
              the first and the last of these sequences for each program: num_programs, num_programs]

Grid: (num_programs / 32,). Every program sums up the sequences again, which is faster than waiting.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HEADER = 4
RECORD = 8
PROGRAMS_PER_BLOCK = 32
# With fewer keys a program would spend most of its time on starting and on adding parts.
MIN_KEYS_PER_PROGRAM = 128


def plan_size(num_seqs: int, num_programs: int) -> int:
    return HEADER + RECORD * num_seqs + 2 * num_programs


def make_plan(
    plan: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    num_seqs: int,
    num_kv_heads: int,
    num_programs: int,
    tile: int,
    window: int | None,
    row_of_seq: torch.Tensor | None = None,
) -> None:
    """Fills `plan`, which must have space for it. `num_seqs` includes padding. `row_of_seq`: see shared_plan.py."""
    if plan.numel() < plan_size(num_seqs, num_programs):
        raise ValueError(f"plan holds {plan.numel()} numbers, needs {plan_size(num_seqs, num_programs)}")
    _plan_kernel[(triton.cdiv(num_programs, PROGRAMS_PER_BLOCK),)](
        plan,
        query_start,
        context_len,
        row_of_seq,
        num_seqs,
        NUM_KV_HEADS=num_kv_heads,
        NUM_PROGRAMS=num_programs,
        TILE=tile,
        WINDOW=window or 0,
        FLOOR=max(1, MIN_KEYS_PER_PROGRAM // tile),
        SEQS=triton.next_power_of_2(num_seqs),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_seqs"])
def _plan_kernel(
    plan,
    query_start,
    context_len,
    row_of_seq,
    num_seqs,
    NUM_KV_HEADS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    FLOOR: tl.constexpr,
    SEQS: tl.constexpr,
):
    seq = tl.arange(0, SEQS)
    is_seq = seq < num_seqs
    length = tl.load(context_len + seq, mask=is_seq, other=0)
    begin = tl.load(query_start + seq, mask=is_seq, other=0)
    end = tl.load(query_start + seq + 1, mask=is_seq, other=0)
    num_tiles = (length + TILE - 1) // TILE
    if WINDOW > 0:
        num_tiles -= tl.maximum(length - WINDOW, 0) // TILE
    if row_of_seq is not None:
        first_tile = tl.load(row_of_seq + 4 * seq, mask=is_seq, other=0) // TILE
        num_tiles -= first_tile
    num_tiles = tl.where(is_seq & (end - begin == 1) & (length > 0), num_tiles, 0)
    tiles_end = tl.cumsum(num_tiles, 0)
    total = tl.sum(num_tiles, 0) * NUM_KV_HEADS
    per_program = tl.maximum((total + NUM_PROGRAMS - 1) // NUM_PROGRAMS, FLOOR)

    has_tiles = num_tiles > 0
    block = tl.program_id(0)
    if block == 0:
        tl.store(plan, per_program)
        tl.store(plan + 1, total)
        record = plan + 4 + 8 * (tl.cumsum(has_tiles.to(tl.int32), 0) - 1)
        tl.store(record, seq, mask=has_tiles)
        tl.store(record + 1, tiles_end - num_tiles, mask=has_tiles)
        tl.store(record + 2, num_tiles, mask=has_tiles)
        tl.store(record + 3, length, mask=has_tiles)
        tl.store(record + 4, begin, mask=has_tiles)
        if row_of_seq is not None:
            tl.store(record + 5, first_tile, mask=has_tiles)
    # A unit belongs to the sequence after all those that end at or before it.
    ends = (tiles_end * NUM_KV_HEADS)[None, :]
    program = block * 32 + tl.arange(0, 32)
    first_unit = program * per_program
    last_unit = tl.minimum(first_unit + per_program, total) - 1
    num_before = tl.sum(((ends <= first_unit[:, None]) & has_tiles[None, :]).to(tl.int32), 1)
    num_before_last = tl.sum(((ends <= last_unit[:, None]) & has_tiles[None, :]).to(tl.int32), 1)
    entries = plan + 4 + 8 * num_seqs + program
    tl.store(entries, num_before, mask=program < NUM_PROGRAMS)
    tl.store(entries + NUM_PROGRAMS, num_before_last, mask=program < NUM_PROGRAMS)


def make_plan_torch(
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    num_kv_heads: int,
    num_programs: int,
    tile: int,
    window: int | None,
    row_of_seq: torch.Tensor | None = None,
) -> torch.Tensor:
    length = context_len.long()
    first_tile = torch.zeros_like(length)
    num_tiles = (length + tile - 1) // tile
    if window:
        num_tiles -= (length - window).clamp(min=0) // tile
    if row_of_seq is not None:
        first_tile = row_of_seq[: 4 * len(length) : 4].long() // tile
    num_tiles -= first_tile
    num_tiles = torch.where((query_start.diff() == 1) & (length > 0), num_tiles, 0)
    ends = num_tiles.cumsum(0)
    total = int(ends[-1]) * num_kv_heads
    per_program = max(-(-total // num_programs), MIN_KEYS_PER_PROGRAM // tile, 1)
    seqs = torch.nonzero(num_tiles).flatten()
    records = torch.zeros(len(length), RECORD, dtype=torch.long)
    columns = [
        seqs,
        (ends - num_tiles)[seqs],
        num_tiles[seqs],
        length[seqs],
        query_start.long()[seqs],
        first_tile[seqs],
    ]
    records[: len(seqs), :6] = torch.stack(columns, dim=1)
    first_unit = torch.arange(num_programs) * per_program
    last_unit = (first_unit + per_program).clamp(max=total) - 1
    entries = [(ends[seqs] * num_kv_heads <= unit[:, None]).sum(1) for unit in (first_unit, last_unit)]
    head = torch.tensor([per_program, total, 0, 0])
    return torch.cat([head, records.flatten(), *entries]).int()
