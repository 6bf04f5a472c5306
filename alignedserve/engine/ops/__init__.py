"""Backends by name. Each executes the same operations (`base.Ops`); a model never knows which."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from alignedserve.engine.ops.base import Ops

logger = logging.getLogger(__name__)


def _torch(device: torch.device, dtype: torch.dtype) -> Ops:
    from alignedserve.engine.ops.torch_ops import TorchOps

    return TorchOps(dtype, device)


def _cpu(device: torch.device, dtype: torch.dtype) -> Ops:
    from alignedserve.engine.ops.cpu_ops import CpuOps
    from kernels.cpu.library import library

    if device.type != "cpu":
        raise ValueError(f"attention_backend='cpu': runs on device cpu, not {device}")
    library()
    return CpuOps(dtype)


BACKENDS: dict[str, Callable[[torch.device, torch.dtype], Ops]] = {"torch": _torch, "cpu": _cpu}


def make_ops(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Ops:
    """`auto`: the fastest that runs such a model."""
    if name == "auto":
        return _best(device, dtype, head_dim)
    if name not in BACKENDS:
        raise ValueError(f"attention_backend={name!r}: must be auto or one of {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name](device, dtype)


def _best(device: torch.device, dtype: torch.dtype, head_dim: int) -> Ops:
    if device.type != "cpu":
        return _torch(device, dtype)
    from kernels.cpu.build import BuildFailed, NoCompiler

    try:
        _check_head_dim(head_dim)
        return _cpu(device, dtype)
    except (NoCompiler, BuildFailed, ValueError) as error:
        logger.warning(
            "The native CPU backend is not available, using torch instead, which is slower: %s", error
        )
        return _torch(device, dtype)


def _check_head_dim(head_dim: int) -> None:
    from alignedserve.engine.ops.cpu_ops import MAX_HEAD_DIM

    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim={head_dim}: the native kernels take multiples of 8, up to {MAX_HEAD_DIM}")
