"""Attention of one new token per sequence over its paged KV. Its speed is limited by reading keys and values.

Blocks are [kv_head, slot, row] (kv_rows.py) for K and the same for V, somewhere in a cache of [block, layer, k|v, ...].
The slots of a head are contiguous. All query heads of one KV head share a tile of keys, so that each key is read once.

- `balanced` (grid: num_programs, fixed): each program takes an equal part of all tiles (decode_plan.py), across
  sequences. If a head's tiles are divided between programs, each stores its part in float32, and the program that
  finishes last adds the parts up, in the order of the keys. There is one launch, and nothing to clear between steps.
- `plain` (grid: sequences, KV heads): one program reads all keys of its head. This is the usual form, and the baseline
  for the balanced form.

q, out [tokens, num_heads, head_dim]; sequence s's token is query_start[s]. Rows of sequences that compute more than one
token, and of padding, are not written. float32, float16 or bfloat16, the cache may be 8 bits; arithmetic in float32.
The codes of int8 rows are multiplied unscaled: their scales multiply scores and weights. `sinks` [num_heads] take part
in the softmax. They are added once, after all parts of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from alignedserve.kernels.kv_rows import as_movable, from_rows
from alignedserve.kernels.triton.decode_plan import make_plan, plan_size
from alignedserve.kernels.triton.kv_rows import codes_of, scales_of
from alignedserve.kernels.triton.paged_attention import (
    LOG2_E,
    PagedStep,
    add_loaded,
    attend_to_tile,
    attend_to_tiles,
    check_attention,
    look_up,
    no_keys,
)
from alignedserve.kernels.triton.shared_attention import Shared, add_shared, shared_attention


@dataclass(frozen=True)
class Tuning:
    """How a kernel is divided for the device. Measured on an H200: see benchmarks/gpu/attention.py."""

    tile: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2


def decode_tuning(
    heads_per_kv: int, head_dim: int, element_bytes: int, is_coded: bool = False, is_shared: bool = False
) -> Tuning:
    """Returns the fastest tuning on an H200. Wide heads were not measured; for them it returns one that fits.
    `element_bytes`: bytes per value of q. An 8-bit cache and `is_shared` (shared_attention.py) were not measured."""
    if element_bytes > 2 and (is_coded or is_shared):
        # Values widened to float32, or parts that are added, are held in registers. A product takes 16 keys or more.
        return Tuning(tile=16, num_warps=8, num_stages=2, programs_per_sm=2)
    if head_dim > 128:
        return Tuning(tile=64 // element_bytes, num_warps=4, num_stages=2, programs_per_sm=2)
    if element_bytes > 2:
        return Tuning(tile=32, num_warps=4, num_stages=2, programs_per_sm=2)
    if heads_per_kv == 1:
        return Tuning(tile=64, num_warps=4, num_stages=2, programs_per_sm=3)
    # With three stages, codes that are widened and parts that are added don't fit into registers.
    num_stages = 2 if is_coded and is_shared else 3
    return Tuning(tile=64, num_warps=4, num_stages=num_stages, programs_per_sm=2)


class DecodeScratch:
    """Buffers of the balanced form, for one shape of attention."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_seqs: int,
        num_sms: int,
        device: torch.device,
        tuning: Tuning,
    ) -> None:
        self.tuning = tuning
        self.num_programs = num_sms * tuning.programs_per_sm
        rows, width = _rows(num_heads, num_kv_heads), triton.next_power_of_2(head_dim)
        self.parts = torch.empty(2 * self.num_programs, rows, width, dtype=torch.float32, device=device)
        # The maximum and the sum per part and row.
        self.weights = torch.empty(2 * self.num_programs, 2, rows, dtype=torch.float32, device=device)
        # Stored parts of each head. It returns to zero when all are stored.
        self.num_done = torch.zeros(max_seqs * num_kv_heads, dtype=torch.int32, device=device)
        self.max_plan = plan_size(max_seqs, self.num_programs)

    def new_plan(self) -> torch.Tensor:
        return torch.zeros(self.max_plan, dtype=torch.int32, device=self.parts.device)

    def make_plan(
        self,
        plan: torch.Tensor,
        step: PagedStep,
        num_kv_heads: int,
        window: int | None,
        shared: Shared | None = None,
    ) -> None:
        make_plan(
            plan,
            step.query_start,
            step.context_len,
            step.num_seqs,
            num_kv_heads,
            self.num_programs,
            self.tuning.tile,
            window,
            shared.plan.row_of_seq if shared else None,
        )


def balanced_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    step: PagedStep,
    plan: torch.Tensor,
    scratch: DecodeScratch,
    scale: float,
    window: int | None,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    shared: Shared | None = None,
) -> torch.Tensor:
    """`cache`: one layer's [block, 2, kv_head, slot, row], a view of all layers. `plan`: made for this step, window and
    `shared`, which is the plan of keys that are read once for several sequences."""
    form = _form(q, cache, out, sinks, window, scratch.tuning)
    if shared:
        shared_attention(q, cache, step, shared, scale)
    _balanced_kernel[(scratch.num_programs,)](
        q,
        codes_of(cache),
        scales_of(cache),
        sinks,
        out,
        plan,
        scratch.parts,
        scratch.weights,
        scratch.num_done,
        step.block_table,
        step.table_stride,
        step.is_reversed,
        *(shared.tensors if shared else (None,) * 5),
        step.num_seqs,
        step.group,
        step.num_groups,
        scale * LOG2_E.value,
        cache.stride(0),
        cache.stride(1),
        HEADS_UP=triton.next_power_of_2(q.shape[1] // cache.shape[2]),
        SHARED_ROWS=shared.scratch.tuning.rows if shared else 0,
        **form,
    )
    return out


def plain_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    step: PagedStep,
    scale: float,
    window: int | None,
    out: torch.Tensor,
    tuning: Tuning,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    form = _form(q, cache, out, sinks, window, tuning)
    _plain_kernel[(step.num_seqs, cache.shape[2])](
        q,
        codes_of(cache),
        scales_of(cache),
        sinks,
        out,
        step.query_start,
        step.context_len,
        step.block_table,
        step.table_stride,
        step.is_reversed,
        step.group,
        step.num_groups,
        scale * LOG2_E.value,
        cache.stride(0),
        cache.stride(1),
        **form,
    )
    return out


def _form(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    window: int | None,
    tuning: Tuning,
) -> dict[str, int]:
    """Checks the tensors, and returns the arguments for which both kernels are compiled."""
    num_heads, num_kv_heads, head_dim, block_size = check_attention(q, cache, out, sinks)
    return {
        "Q_STRIDE": q.stride(0),
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "ROW": cache.shape[4],
        "BLOCK_SIZE": block_size,
        "WINDOW": window or 0,
        "ROWS": _rows(num_heads, num_kv_heads),
        "WIDTH": triton.next_power_of_2(head_dim),
        "TILE": tuning.tile,
        "num_warps": tuning.num_warps,
        "num_stages": tuning.num_stages,
    }


def _rows(num_heads: int, num_kv_heads: int) -> int:
    # A matrix instruction takes at least this many rows.
    heads_per_kv: int = triton.next_power_of_2(num_heads // num_kv_heads)
    return max(16, heads_per_kv)


@triton.jit
def _load_q(
    q, token, kv_head, Q_STRIDE, HEADS, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    at = q + token.to(tl.int64) * Q_STRIDE + (kv_head * HEADS + row)[:, None] * HEAD_DIM + dim[None, :]
    return tl.load(at, mask=(row < HEADS)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _skipped(length, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Returns the number of tiles before the window."""
    return tl.maximum(length - WINDOW, 0) // TILE if WINDOW > 0 else 0


@triton.jit
def _store_out(
    out, acc, total, highest, sinks, token, kv_head, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`sinks` have a weight in the sum, but no value."""
    row = tl.arange(0, ROWS)
    if sinks is not None:
        sink = tl.load(sinks + kv_head * HEADS + row, mask=row < HEADS, other=0.0).to(tl.float32)
        total += tl.exp2(sink * LOG2_E - highest)
    dim = tl.arange(0, WIDTH)
    at = out + token.to(tl.int64) * NUM_HEADS * HEAD_DIM + (kv_head * HEADS + row)[:, None] * HEAD_DIM
    mask = (row < HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(at + dim[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_seqs", "group", "num_groups"])
def _balanced_kernel(
    q,
    cache,
    scales,
    sinks,
    out,
    plan,
    parts,
    weights,
    num_done,
    block_table,
    table_stride,
    is_reversed,
    row_of_seq,
    header,
    tasks,
    shared_parts,
    shared_weights,
    num_seqs,
    group,
    num_groups,
    scale,
    block_stride,
    value_offset,
    Q_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    HEADS_UP: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
):
    HEADS: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    program = tl.program_id(0)
    per_program = tl.load(plan)
    first_unit = program * per_program
    end_unit = tl.minimum(first_unit + per_program, tl.load(plan + 1))
    group_stride = tl.load(table_stride).to(tl.int64)
    row_stride = num_groups * group_stride
    table = block_table + group * group_stride
    is_used = first_unit < end_unit
    record = plan + 4 + 8 * tl.load(plan + 4 + 8 * num_seqs + program)
    seq, seq_start, num_tiles, length, token = _load_record(record, is_used)
    kv_head = (first_unit - seq_start * NUM_KV_HEADS) // tl.maximum(num_tiles, 1)
    tile = (first_unit - seq_start * NUM_KV_HEADS) % tl.maximum(num_tiles, 1)
    skipped = _skipped(length, WINDOW, TILE)
    if row_of_seq is not None:
        skipped += tl.load(record + 5, mask=is_used, other=0)
    block = look_up(table + seq * row_stride, skipped + tile, length, BLOCK_SIZE, TILE)
    first_seq, first_head, first_tiles, first_token, first_start = (
        seq,
        kv_head,
        num_tiles,
        token,
        first_unit - tile,
    )
    highest, total, acc = no_keys(ROWS, WIDTH)
    # One loop over the tiles of all heads, so that keys of the next head are loaded while this one ends.
    for unit in range(first_unit, end_unit):
        highest, total, acc = attend_to_tile(
            _load_q(q, token, kv_head, Q_STRIDE, HEADS, HEAD_DIM, ROWS, WIDTH),
            cache,
            scales,
            kv_head,
            block,
            is_reversed,
            seq,
            skipped + tile,
            length,
            highest,
            total,
            acc,
            scale,
            block_stride,
            value_offset,
            HEAD_DIM,
            ROW,
            BLOCK_SIZE,
            WINDOW,
            WIDTH,
            TILE,
        )
        head_start = unit - tile
        is_last = tile + 1 == num_tiles
        is_over = is_last | (unit + 1 == end_unit)
        if is_over:
            if is_last & (head_start >= first_unit):
                if row_of_seq is not None:
                    acc, total, highest = add_shared(
                        acc, total, highest, row_of_seq, header, tasks, shared_parts, shared_weights, seq, kv_head,
                        HEADS, NUM_KV_HEADS, SHARED_ROWS, ROWS, WIDTH,
                    )  # fmt: skip
                _store_out(
                    out, acc, total, highest, sinks, token, kv_head, NUM_HEADS, HEADS, HEAD_DIM, ROWS, WIDTH
                )  # fmt: skip
            else:
                slot = 2 * program + (head_start > first_unit)
                _leave_part(parts, weights, slot, acc, highest, total, HEADS, ROWS, WIDTH)
        highest = tl.where(is_over, float("-inf"), highest)
        total = tl.where(is_over, 0.0, total)
        acc = tl.where(is_over, 0.0, acc)
        tile = tl.where(is_last, 0, tile + 1)
        kv_head += is_last.to(tl.int32)
        is_seq_over = kv_head == NUM_KV_HEADS
        kv_head = tl.where(is_seq_over, 0, kv_head)
        record += tl.where(is_seq_over, 8, 0)
        seq, seq_start, num_tiles, length, token = _load_record(record, unit + 1 < end_unit)
        skipped = _skipped(length, WINDOW, TILE)
        if row_of_seq is not None:
            skipped += tl.load(record + 5, mask=unit + 1 < end_unit, other=0)
        block = look_up(table + seq * row_stride, skipped + tile, length, BLOCK_SIZE, TILE)
    if is_used:
        # Stored parts of this program must be visible before it counts itself as done.
        tl.debug_barrier()
        if (first_start < first_unit) | (first_start + first_tiles > end_unit):
            _add_up(
                out, sinks, parts, weights, num_done, first_seq, first_head, first_tiles, first_token, first_start,
                per_program, row_of_seq, header, tasks, shared_parts, shared_weights, NUM_HEADS, NUM_KV_HEADS,
                HEAD_DIM, ROWS, WIDTH, HEADS_UP, SHARED_ROWS,
            )  # fmt: skip
        # The last head's values are read again: the loop has computed addresses ahead, past the end.
        record = plan + 4 + 8 * tl.load(plan + 4 + 8 * num_seqs + tl.num_programs(0) + program)
        last_seq, seq_start, last_tiles, length, last_token = _load_record(record, is_used)
        into = end_unit - 1 - seq_start * NUM_KV_HEADS
        last_start = end_unit - 1 - into % last_tiles
        if (last_start > first_start) & (last_start + last_tiles > end_unit):
            _add_up(
                out, sinks, parts, weights, num_done, last_seq, into // last_tiles, last_tiles, last_token, last_start,
                per_program, row_of_seq, header, tasks, shared_parts, shared_weights, NUM_HEADS, NUM_KV_HEADS,
                HEAD_DIM, ROWS, WIDTH, HEADS_UP, SHARED_ROWS,
            )  # fmt: skip


@triton.jit
def _add_up(
    out, sinks, parts, weights, num_done, seq, kv_head, num_tiles, token, head_start, per_program, row_of_seq, header,
    tasks, shared_parts, shared_weights, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HEADS_UP: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
):  # fmt: skip
    """Counts one more part of this head as stored. The program that stores the last one adds them up."""
    HEADS: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    first_program = head_start // per_program
    last_program = (head_start + num_tiles - 1) // per_program
    done = num_done + seq * NUM_KV_HEADS + kv_head
    if tl.atomic_add(done, 1, sem="acq_rel") == last_program - first_program:
        tl.store(done, 0)
        acc, total, highest = _add_parts(
            parts, weights, first_program, last_program, head_start, per_program, HEADS, ROWS, WIDTH, HEADS_UP
        )
        if row_of_seq is not None:
            acc, total, highest = add_shared(
                acc, total, highest, row_of_seq, header, tasks, shared_parts, shared_weights, seq, kv_head,
                HEADS, NUM_KV_HEADS, SHARED_ROWS, HEADS_UP, WIDTH,
            )  # fmt: skip
        _store_out(
            out, acc, total, highest, sinks, token, kv_head, NUM_HEADS, HEADS, HEAD_DIM, HEADS_UP, WIDTH
        )


@triton.jit
def _load_record(record, is_there):
    """Returns a sequence of the plan: its number, tiles before it, its tiles, its length, its token."""
    return (
        tl.load(record, mask=is_there, other=0),
        tl.load(record + 1, mask=is_there, other=0),
        tl.load(record + 2, mask=is_there, other=0),
        tl.load(record + 3, mask=is_there, other=0),
        tl.load(record + 4, mask=is_there, other=0),
    )


@triton.jit
def _leave_part(
    parts, weights, slot, acc, highest, total, HEADS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Stores a part. A program has at most two. Slot 0 is for the head that it began in the middle of,
    slot 1 for the head that it did not finish."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    is_head = row < HEADS
    at = parts + slot * ROWS * WIDTH + row[:, None] * WIDTH + dim[None, :]
    tl.store(at, acc, mask=is_head[:, None])
    tl.store(weights + slot * 2 * ROWS + row, highest, mask=is_head)
    tl.store(weights + slot * 2 * ROWS + ROWS + row, total, mask=is_head)


@triton.jit
def _add_parts(
    parts, weights, first_program, last_program, head_start, per_program, HEADS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HEADS_UP: tl.constexpr,
):  # fmt: skip
    """Adds up the parts, eight at a time, so that their loads are issued together."""
    row = tl.arange(0, HEADS_UP)
    dim = tl.arange(0, WIDTH)
    is_head = row < HEADS
    highest, total, acc = no_keys(HEADS_UP, WIDTH)
    for first in range(first_program, last_program + 1, 8):
        program = first + tl.arange(0, 8)
        slot = 2 * program + (program * per_program < head_start)
        mask = (program <= last_program)[:, None] & is_head[None, :]
        at = weights + slot[:, None] * 2 * ROWS + row[None, :]
        # Bypasses the multiprocessor's own cache, because other programs wrote the parts.
        part_highest = tl.load(at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        part_total = tl.load(at + ROWS, mask=mask, other=0.0, cache_modifier=".cg")
        at = parts + slot[:, None, None] * ROWS * WIDTH + row[None, :, None] * WIDTH + dim[None, None, :]
        part = tl.load(at, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")
        acc, total, highest = add_loaded(acc, total, highest, part, part_total, part_highest, is_head)
    return acc, total, highest


@triton.jit(do_not_specialize=["group", "num_groups"])
def _plain_kernel(
    q,
    cache,
    scales,
    sinks,
    out,
    query_start,
    context_len,
    block_table,
    table_stride,
    is_reversed,
    group,
    num_groups,
    scale,
    block_stride,
    value_offset,
    Q_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    HEADS: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    length = tl.load(context_len + seq)
    token = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - token
    table = block_table + (seq * num_groups + group) * tl.load(table_stride).to(tl.int64)
    first_tile = _skipped(length, WINDOW, TILE)
    block = look_up(table, first_tile, length, BLOCK_SIZE, TILE)
    if (length > 0) & (num_queries == 1):
        query = _load_q(q, token, kv_head, Q_STRIDE, HEADS, HEAD_DIM, ROWS, WIDTH)
        highest, total, acc = no_keys(ROWS, WIDTH)
        highest, total, acc = attend_to_tiles(
            query, cache, scales, kv_head, table, block, is_reversed, seq, first_tile, (length + TILE - 1) // TILE,
            length, highest, total, acc, scale, block_stride, value_offset, HEAD_DIM, ROW, BLOCK_SIZE, WINDOW, WIDTH,
            TILE,
        )  # fmt: skip
        _store_out(out, acc, total, highest, sinks, token, kv_head, NUM_HEADS, HEADS, HEAD_DIM, ROWS, WIDTH)


def decode_attention_torch(
    q: torch.Tensor,
    cache: torch.Tensor,
    step: PagedStep,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The reference, in float64. Rows of other tokens are zero."""
    num_kv_heads, block_size = cache.shape[2], cache.shape[3]
    heads = q.shape[1] // num_kv_heads
    stride = int(step.table_stride[0])
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    starts, lengths = step.query_start.tolist(), step.context_len.tolist()
    for seq in range(step.num_seqs):
        length = lengths[seq]
        if length == 0 or starts[seq + 1] - starts[seq] != 1:
            continue
        row = seq * step.num_groups + step.group
        blocks = step.block_table.flatten()[row * stride :][: -(-length // block_size)].long()
        # [2, kv_head, tokens, head_dim]
        held = from_rows(as_movable(cache)[blocks].view(cache.dtype))
        if step.is_reversed is not None and step.is_reversed[seq]:
            held = held.flip(3)
        kv = held.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length].double()
        if window:
            kv = kv[:, :, max(0, length - window) :]
        keys, values = kv.repeat_interleave(heads, dim=1)
        scores = torch.einsum("hd,htd->ht", q[starts[seq]].double(), keys) * scale
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().unsqueeze(1)], dim=1)
        weights = scores.softmax(-1)[:, : values.shape[1]]
        out[starts[seq]] = torch.einsum("ht,htd->hd", weights, values)
    return out
