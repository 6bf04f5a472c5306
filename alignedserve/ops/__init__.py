"""Backends by name. All execute the same operations (`base.Ops`), so a model does not depend on its backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from alignedserve.kernels.cpu.build import BuildFailed, NoCompiler
from alignedserve.ops.base import Ops
from alignedserve.ops.ranks import RankGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CudaOptions:
    """Options of the CUDA backend alone: see EngineConfig."""

    decode_kernel: str = "balanced"
    # Batch sizes of decodes that are captured as CUDA graphs.
    graph_sizes: tuple[int, ...] = ()
    use_tqdm: bool = False


@dataclass(frozen=True)
class _Wanted:
    """The arguments of a backend."""

    device: torch.device
    dtype: torch.dtype
    options: CudaOptions
    quantization: str | None
    ranks: RankGroup | None


def _torch(wanted: _Wanted) -> Ops:
    from alignedserve.ops.torch_ops import TorchOps

    return TorchOps(wanted.dtype, wanted.device, wanted.quantization, wanted.ranks)


def _cpu(wanted: _Wanted) -> Ops:
    from alignedserve.kernels.cpu.library import library
    from alignedserve.ops.cpu_ops import CpuOps

    if wanted.device.type != "cpu":
        raise ValueError(f"attention_backend='cpu': runs on device cpu, not {wanted.device}")
    library()
    return CpuOps(wanted.dtype, quantization=wanted.quantization, ranks=wanted.ranks)


def _triton(wanted: _Wanted) -> Ops:
    try:
        from alignedserve.ops.cuda_ops import CudaOps
    except ModuleNotFoundError as error:
        raise ValueError(f"attention_backend='triton': {error.name} is not installed") from None
    from triton import knobs

    if wanted.device.type == "cuda":
        capability = torch.cuda.get_device_capability(wanted.device)
        if capability < MIN_CAPABILITY:
            raise ValueError(
                f"attention_backend='triton': needs a GPU of compute capability 8.0 or newer, this one has {capability}"
            )
    elif not knobs.runtime.interpret:
        raise ValueError(f"attention_backend='triton': runs on device cuda, not {wanted.device}")
    options = wanted.options
    return CudaOps(
        wanted.dtype,
        wanted.device,
        decode_kernel=options.decode_kernel,
        graph_sizes=options.graph_sizes,
        use_tqdm=options.use_tqdm,
        quantization=wanted.quantization,
        ranks=wanted.ranks,
    )


MIN_CAPABILITY = (8, 0)
# These errors mean that a backend does not work on this machine or with this model.
UNAVAILABLE = (NoCompiler, BuildFailed, ValueError)
BACKENDS: dict[str, Callable[[_Wanted], Ops]] = {
    "torch": _torch,
    "cpu": _cpu,
    "triton": _triton,
}


def make_ops(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    options: CudaOptions | None = None,
    quantization: str | None = None,
    ranks: RankGroup | None = None,
) -> Ops:
    """Makes the backend of this name. `auto`: the fastest one that can run the model. `ranks`: given if this process
    is one of several ranks."""
    wanted = _Wanted(device, dtype, options or CudaOptions(), quantization, ranks)
    if name == "auto":
        return _best(wanted, head_dim)
    if name not in BACKENDS:
        raise ValueError(f"attention_backend={name!r}: must be auto or one of {', '.join(sorted(BACKENDS))}")
    _check_head_dim(name, head_dim)
    return BACKENDS[name](wanted)


def fastest(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "triton"


def _best(wanted: _Wanted, head_dim: int) -> Ops:
    name = fastest(wanted.device)
    try:
        _check_head_dim(name, head_dim)
        return BACKENDS[name](wanted)
    except UNAVAILABLE as error:
        logger.warning("Backend %s is not available, using torch instead, which is slower: %s", name, error)
        return _torch(wanted)


def _check_head_dim(name: str, head_dim: int) -> None:
    from alignedserve.ops.cpu_ops import MAX_HEAD_DIM

    if name != "torch" and (head_dim % 8 or head_dim > MAX_HEAD_DIM):
        raise ValueError(f"head_dim={head_dim}: the native kernels take multiples of 8, up to {MAX_HEAD_DIM}")
