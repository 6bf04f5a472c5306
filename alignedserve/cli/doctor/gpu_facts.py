"""Facts about this machine's GPUs, as plain values."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.metadata import version
from itertools import permutations
from pathlib import Path

import torch

_DRIVER = Path("/proc/driver/nvidia")


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    num_free_bytes: int
    num_total_bytes: int


@dataclass(frozen=True)
class GpuFacts:
    # CUDA version of torch; None: torch is built for CPUs only.
    cuda_version: str | None
    # Version of the driver; empty without a driver.
    driver: str
    # Number of GPUs that the driver has, including those that this process can't use.
    num_driver_gpus: int
    # GPUs that torch can use.
    gpus: tuple[Gpu, ...]
    # Pairs of GPUs: the first can't access the memory of the second.
    unreachable: tuple[tuple[int, int], ...]
    triton_version: str | None


def gpu_facts() -> GpuFacts:
    indexes = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return GpuFacts(
        torch.version.cuda,
        _driver_version(),
        len(list((_DRIVER / "gpus").glob("*"))),
        tuple(map(_gpu, indexes)),
        tuple(pair for pair in permutations(indexes, 2) if not torch.cuda.can_device_access_peer(*pair)),
        _triton_version(),
    )


def _gpu(index: int) -> Gpu:
    num_free, num_total = torch.cuda.mem_get_info(index)
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    return Gpu(name, capability, num_free, num_total)


def _driver_version() -> str:
    try:
        words = (_DRIVER / "version").read_text().split()
    except OSError:
        return ""
    return next((word for word in words if word[0].isdigit() and "." in word), "(unknown version)")


def _triton_version() -> str | None:
    try:
        importlib.import_module("triton")
        return version("triton")
    except ImportError:
        return None
