"""Blocks by id out of a store into one contiguous buffer, and back: one launch for a move of many small blocks.

Grid: (blocks, pieces of PIECE words).
Shapes: store [num_blocks, ...], each block contiguous, blocks may lie apart; ids [moved] int32 or int64;
buffer [moved, ...], contiguous. Row i of the buffer is block ids[i]; an id of -1 is padding and moves nothing.
dtypes: any; a block is moved as 32-bit words, 16 bytes at a time, and must be a multiple of 16 bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Four warps of threads with four times 16 bytes each.
PIECE = 2048
ALIGNMENT = 16


@triton.jit
def move_blocks_kernel(
    store, ids, buffer, store_stride, WORDS: tl.constexpr, PIECE: tl.constexpr, IS_GATHER: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.load(ids + row).to(tl.int64)
    if block >= 0:
        words = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
        exists = words < WORDS
        in_store = store + block * store_stride + words
        in_buffer = buffer + row * WORDS + words
        if IS_GATHER:
            tl.store(in_buffer, tl.load(in_store, exists), exists)
        else:
            tl.store(in_store, tl.load(in_buffer, exists), exists)


def gather_blocks(store: torch.Tensor, ids: torch.Tensor, buffer: torch.Tensor) -> None:
    """buffer[i] = store[ids[i]]"""
    _move(store, ids, buffer, is_gather=True)


def scatter_blocks(buffer: torch.Tensor, ids: torch.Tensor, store: torch.Tensor) -> None:
    """store[ids[i]] = buffer[i]; no id may come twice."""
    _move(store, ids, buffer, is_gather=False)


def _move(store: torch.Tensor, ids: torch.Tensor, buffer: torch.Tensor, is_gather: bool) -> None:
    _check(store, ids, buffer)
    if len(ids) == 0:
        return
    words, buffer_words = _as_words(store), _as_words(buffer)
    grid = (len(ids), triton.cdiv(words.shape[1], PIECE))
    move_blocks_kernel[grid](
        words,
        ids,
        buffer_words,
        words.stride(0),
        WORDS=words.shape[1],
        PIECE=PIECE,
        IS_GATHER=is_gather,
        num_warps=4,
    )


def _as_words(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.flatten(1).view(torch.int32)


def _check(store: torch.Tensor, ids: torch.Tensor, buffer: torch.Tensor) -> None:
    if store.dim() < 2 or not store[:1].is_contiguous():
        raise ValueError(f"store must hold contiguous blocks, not {tuple(store.shape)} at {store.stride()}")
    block_bytes = store[:1].numel() * store.element_size()
    stride_bytes = store.stride(0) * store.element_size()
    if block_bytes % ALIGNMENT or stride_bytes % ALIGNMENT or store.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"store must have blocks of multiples of {ALIGNMENT} bytes, not {block_bytes} {stride_bytes} apart"
        )
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1 or not ids.is_contiguous():
        raise ValueError(f"ids must be contiguous int32 or int64, not {ids.dtype} {tuple(ids.shape)}")
    if ids.device != store.device:
        raise ValueError(f"ids must be on {store.device}, not {ids.device}")
    expected = (len(ids), *store.shape[1:])
    if tuple(buffer.shape) != expected or not buffer.is_contiguous():
        raise ValueError(f"buffer must be contiguous {list(expected)}, not {tuple(buffer.shape)}")
    if buffer.dtype != store.dtype or buffer.device != store.device or buffer.data_ptr() % ALIGNMENT:
        raise ValueError(f"buffer must be aligned {store.dtype} on {store.device}, not {buffer.dtype}")


def gather_blocks_reference(store: torch.Tensor, ids: torch.Tensor, buffer: torch.Tensor) -> None:
    moved = ids >= 0
    buffer[moved] = store[ids[moved].long()]


def scatter_blocks_reference(buffer: torch.Tensor, ids: torch.Tensor, store: torch.Tensor) -> None:
    moved = ids >= 0
    store[ids[moved].long()] = buffer[moved]
