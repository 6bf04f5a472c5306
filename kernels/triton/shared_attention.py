"""Attention to keys that decoding sequences have in common: each is read once for all rows of a task (shared_plan.py).

A program stacks the query heads of several sequences as the rows of one matrix product. It reads a tile once, and keeps
each row's maximum, sum and weighted values. A tile that only some of its rows have in common is masked for the others.
At the end of a task and head, it stores what it has as a part (paged_attention.py). `balanced` attention then reads
each sequence's own keys, and adds the parts before it divides (`add_shared`).

Grid: num_programs, fixed. q [tokens, num_heads, head_dim], and the same formats of KV as in decode_attention.py.
Sequences that fill their blocks from the end share nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from alignedserve.kernels.triton.kv_rows import codes_of, scales_of
from alignedserve.kernels.triton.paged_attention import (
    LOG2_E,
    PagedStep,
    Parts,
    add_parts,
    attend_to_tiles,
    check_attention,
    leave_part,
    look_up,
    no_keys,
)
from alignedserve.kernels.triton.shared_plan import MAX_PARTS as MAX_PARTS_OF_PLAN
from alignedserve.kernels.triton.shared_plan import SharedPlan

MAX_PARTS: tl.constexpr = tl.constexpr(MAX_PARTS_OF_PLAN)


@dataclass(frozen=True)
class SharedTuning:
    """Not measured: chosen so that registers don't spill, and two programs fit into a multiprocessor."""

    # 64 are the rows of one matrix instruction of Hopper.
    rows: int = 64
    tile: int = 64
    num_warps: int = 4
    num_stages: int = 2
    programs_per_sm: int = 2


def shared_tuning(head_dim: int, element_bytes: int) -> SharedTuning:
    """`element_bytes`: bytes per value of q."""
    if element_bytes > 2:
        # Products of float32 take no matrix instructions, and hold both factors in registers.
        return SharedTuning(rows=16, tile=16, num_warps=8)
    if head_dim > 128:
        return SharedTuning(tile=32, num_warps=8, programs_per_sm=1)
    return SharedTuning()


class SharedScratch:
    """Parts, for one shape of attention. A task's parts have only the rows that it has."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        max_seqs: int,
        num_sms: int,
        device: torch.device,
        tuning: SharedTuning,
    ) -> None:
        self.tuning = tuning
        self.num_programs = num_sms * tuning.programs_per_sm
        self.parts = Parts(max_seqs * num_heads + self.num_programs * tuning.rows, head_dim, device)


@dataclass(frozen=True)
class Shared:
    plan: SharedPlan
    scratch: SharedScratch

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What `add_shared` reads."""
        plan, parts = self.plan, self.scratch.parts
        return plan.row_of_seq, plan.header, plan.tasks, parts.values, parts.weights


def shared_attention(
    q: torch.Tensor, cache: torch.Tensor, step: PagedStep, shared: Shared, scale: float
) -> None:
    """Leaves the parts of all tasks. `cache`: see `balanced_attention`."""
    num_heads, num_kv_heads, head_dim, block_size = check_attention(q, cache, q, None)
    plan, scratch, tuning = shared.plan, shared.scratch, shared.scratch.tuning
    _shared_kernel[(scratch.num_programs,)](
        q,
        codes_of(cache),
        scales_of(cache),
        step.query_start,
        plan.header,
        plan.programs,
        plan.tasks,
        plan.segments,
        plan.rows,
        scratch.parts.values,
        scratch.parts.weights,
        step.block_table,
        step.table_stride,
        step.group,
        step.num_groups,
        scale * LOG2_E.value,
        cache.stride(0),
        cache.stride(1),
        Q_STRIDE=q.stride(0),
        HEADS=num_heads // num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROW=cache.shape[4],
        BLOCK_SIZE=block_size,
        ROWS=tuning.rows,
        WIDTH=triton.next_power_of_2(head_dim),
        TILE=tuning.tile,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


@triton.jit
def _first_part_row(
    program, first_row, num_rows, kv_head, HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, ROWS: tl.constexpr
):
    """Returns where a program stores its part of a task and head: behind those of all tasks and heads before it, and
    behind those of all programs before it."""
    return (first_row * NUM_KV_HEADS + kv_head * num_rows) * HEADS + program * ROWS


@triton.jit(do_not_specialize=["group", "num_groups"])
def _shared_kernel(
    q,
    cache,
    scales,
    query_start,
    header,
    programs,
    tasks,
    segments,
    rows,
    parts,
    weights,
    block_table,
    table_stride,
    group,
    num_groups,
    scale,
    block_stride,
    value_offset,
    Q_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    per_program = tl.load(header + 1)
    first_unit = program * per_program
    end_unit = tl.minimum(first_unit + per_program, tl.load(header + 2))
    group_stride = tl.load(table_stride).to(tl.int64)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    last_item = tl.load(programs + tl.num_programs(0) + program)
    for item in range(tl.load(programs + program), last_item + 1):
        task = tasks + 8 * (item // NUM_KV_HEADS)
        kv_head = item % NUM_KV_HEADS
        first_row = tl.load(task)
        num_rows = tl.load(task + 1)
        num_tiles = tl.load(task + 3)
        start = tl.load(task + 2) * NUM_KV_HEADS + kv_head * num_tiles
        begin = tl.maximum(first_unit - start, 0)
        end = tl.minimum(end_unit - start, num_tiles)
        is_row = row < num_rows * HEADS
        seq = tl.load(rows + first_row + row // HEADS, mask=is_row, other=0)
        token = tl.load(query_start + seq, mask=is_row, other=0).to(tl.int64)
        at = q + (token * Q_STRIDE + (kv_head * HEADS + row % HEADS) * HEAD_DIM)[:, None] + dim[None, :]
        query = tl.load(at, mask=is_row[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        highest, total, acc = no_keys(ROWS, WIDTH)
        for index in range(tl.load(task + 4), tl.load(task + 5)):
            segment = segments + 8 * index
            first_tile = tl.load(segment)
            num_segment_tiles = tl.load(segment + 1)
            segment_row = tl.load(segment + 2)
            end_row = segment_row + tl.load(segment + 3)
            before = tl.load(segment + 4)
            attends = (row >= segment_row * HEADS) & (row < end_row * HEADS)
            table_row = tl.load(rows + first_row + segment_row) * num_groups + group
            table = block_table + table_row * group_stride
            begin_tile = first_tile + tl.maximum(begin - before, 0)
            end_tile = first_tile + tl.minimum(end - before, num_segment_tiles)
            length = end_tile * TILE
            block = look_up(table, begin_tile, length, BLOCK_SIZE, TILE)
            highest, total, acc = attend_to_tiles(
                query, cache, scales, kv_head, table, block, None, 0, begin_tile, end_tile, length, highest, total,
                acc, scale, block_stride, value_offset, HEAD_DIM, ROW, BLOCK_SIZE, 0, WIDTH, TILE, attends,
            )  # fmt: skip
        first = _first_part_row(program, first_row, num_rows, kv_head, HEADS, NUM_KV_HEADS, ROWS)
        leave_part(parts, weights, first, num_rows * HEADS, acc, highest, total, ROWS, WIDTH)


@triton.jit
def add_shared(
    acc, total, highest, row_of_seq, header, tasks, parts, weights, seq, kv_head,
    HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, SHARED_ROWS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Adds a sequence's parts of one KV head, if it is in a task. There is no loop at run time: the loop around this
    could not load keys ahead then."""
    number = tl.load(row_of_seq + 4 * seq + 1)
    if number >= 0:
        task = tasks + 8 * number
        num_rows = tl.load(task + 1)
        num_tiles = tl.load(task + 3)
        start = tl.load(task + 2) * NUM_KV_HEADS + kv_head * num_tiles
        per_program = tl.load(header + 1)
        first_program = start // per_program
        num_parts = (start + num_tiles - 1) // per_program - first_program + 1
        first = _first_part_row(
            first_program, tl.load(task), num_rows, kv_head, HEADS, NUM_KV_HEADS, SHARED_ROWS
        )
        row = tl.arange(0, ROWS)
        is_head = row < HEADS
        rows = first + tl.load(row_of_seq + 4 * seq + 2) * HEADS + row
        # Together they take at most 64 registers of each thread.
        AT_ONCE: tl.constexpr = max(1, min(MAX_PARTS, 8192 // (ROWS * WIDTH)))
        for few in tl.static_range(0, MAX_PARTS, AT_ONCE):
            if few < num_parts:
                part = few + tl.arange(0, AT_ONCE)
                part_rows = part[:, None] * SHARED_ROWS + rows[None, :]
                mask = (part < num_parts)[:, None] & is_head[None, :]
                acc, total, highest = add_parts(
                    acc, total, highest, parts, weights, part_rows, mask, is_head, WIDTH
                )
    return acc, total, highest
