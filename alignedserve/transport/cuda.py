"""What the transports need of CUDA, typed."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind all that is queued on the stream; whoever waits for it sleeps."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def is_through(event: torch.cuda.Event) -> bool:
    """Never waits."""
    return bool(event.query())  # type: ignore[no-untyped-call]


def pin(memory: NDArray[np.uint8]) -> None:
    """Memory that was not made by CUDA, the pool's segment: copies to and from it need no waiting CPU then."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))


def unpin(memory: NDArray[np.uint8]) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostUnregister(memory.ctypes.data))
