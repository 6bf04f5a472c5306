"""The wrappers' checks of their arguments. Each raises a ValueError that names the argument."""

from __future__ import annotations

import torch

from alignedserve.kernels.kv_rows import head_dim_of, is_coded
from alignedserve.kernels.triton.row_tiles import MAX_ROW_WIDTH

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_rows(name: str, x: torch.Tensor) -> None:
    """Checks for [rows, width] of floats. Rows may be strided, columns may not."""
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} must be float32, float16 or bfloat16, not {x.dtype}")
    if x.dim() != 2 or x.shape[1] == 0 or x.stride(1) != 1:
        raise ValueError(f"{name} must be [rows, width] with contiguous rows, not {describe(x)}")


def check_row_width(name: str, x: torch.Tensor) -> None:
    if x.shape[1] > MAX_ROW_WIDTH:
        raise ValueError(f"{name} must be at most {MAX_ROW_WIDTH} wide, not {x.shape[1]}")


def check_like(name: str, x: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    """Checks that x is contiguous, and has this shape and the dtype and device of `like`."""
    check_tensor(name, x, shape, like.dtype, like.device)


def check_tensor(
    name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if tuple(x.shape) != shape or not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous {list(shape)}, not {describe(x)}")
    if x.dtype != dtype or x.device != device:
        raise ValueError(f"{name} must be {dtype} on {device}, not {x.dtype} on {x.device}")


def check_vector(name: str, x: torch.Tensor, length: int, device: torch.device) -> None:
    """Checks for contiguous floats, one for each of `length` columns."""
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} must be float32, float16 or bfloat16, not {x.dtype}")
    check_tensor(name, x, (length,), x.dtype, device)


def check_cache(name: str, cache: torch.Tensor) -> None:
    """Checks for [block, layer, k|v, kv head, slot, row]. Only blocks and layers may be strided."""
    if cache.dtype not in FLOATS and not is_coded(cache):
        raise ValueError(
            f"{name} must be float32, float16, bfloat16, float8_e4m3fn or int8, not {cache.dtype}"
        )
    if cache.dim() != 6 or cache.shape[2] != 2:
        raise ValueError(f"{name} must be [block, layer, 2, kv head, slot, row], not {tuple(cache.shape)}")
    _, _, _, num_kv_heads, block_size, row = cache.shape
    head_stride = block_size * row
    if cache.stride()[2:] != (num_kv_heads * head_stride, head_stride, row, 1):
        raise ValueError(f"{name} must be contiguous within a layer of a block, not {describe(cache)}")
    # Scales in int8 rows must be aligned.
    multiple = 4 if is_coded(cache) else 2
    if (head_dim := head_dim_of(cache)) % multiple:
        raise ValueError(f"{name} must have a head_dim that is a multiple of {multiple}, not {head_dim}")


def check_layer(layer: int, cache: torch.Tensor) -> None:
    if not 0 <= layer < cache.shape[1]:
        raise ValueError(f"layer must be one of the cache's {cache.shape[1]}, not {layer}")


def describe(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} with strides {x.stride()}"
