"""The data path of `ipc`: the receiver copies blocks out of the sender's memory, which it has mapped.

The sender only names its memory, so it may hang or be killed during a copy. If it ends a pull early, for instance at a
deadline, it may overwrite the blocks while the receiver is still copying. So a pull counts only if the sender then
reports that it held the blocks until the end (`Released`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import torch

from alignedserve.transport import cuda, cuda_ipc, shared_memory
from alignedserve.transport.channel import Channel, DeviceMemory, HostMemory, Opened, remaining_s
from alignedserve.transport.copiers import Copier, CudaCopier, HostCopier, PartsCopier
from alignedserve.transport.runs import Run, check_blocks

logger = logging.getLogger(__name__)

NUM_THREADS = 2


def describe(blocks: torch.Tensor) -> HostMemory | DeviceMemory:
    """Returns the location of the blocks. Raises RuntimeError if no other process can map them."""
    if not blocks.is_cuda:
        return shared_memory.describe(blocks)
    cuda.use(blocks.device)
    return cuda_ipc.CudaDriver().describe(blocks.data_ptr(), blocks.nbytes)


class IpcSender:
    is_confirmed = True

    def __init__(self, memories: Sequence[HostMemory | DeviceMemory]) -> None:
        self._memories = memories

    def open(self, channel: Channel, deadline_s: float) -> None:
        channel.send(Opened(tuple(self._memories)), deadline_s)

    def send(self, runs: Sequence[Run]) -> None:
        """Does nothing: the receiver copies the blocks."""

    def close(self) -> None:
        pass


class IpcReceiver:
    is_confirmed = True

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._parts = parts
        self._open_things = contextlib.ExitStack()

    def open(self, channel: Channel, opened: Opened, deadline_s: float) -> None:
        memories = opened.memories
        if len(memories) != len(self._parts):
            raise ConnectionError(
                f"the sender has the memories of {len(memories)} ranks, those to fill are of {len(self._parts)}"
            )
        for memory, part in zip(memories, self._parts, strict=True):
            _check_alike(memory, part)
        self._channel = channel
        self._num_sender_blocks = min(
            memory.num_bytes // part.shape[1] for memory, part in zip(memories, self._parts, strict=True)
        )
        copiers = [self._map(memory, part) for memory, part in zip(memories, self._parts, strict=True)]
        block_bytes = sum(part.shape[1] for part in self._parts)
        self._copier = copiers[0] if len(copiers) == 1 else PartsCopier(copiers, block_bytes)
        self._open_things.callback(self._copier.close)

    def pull(self, runs: Sequence[Run], deadline_s: float) -> None:
        for first, count in ((run.there, run.num_blocks) for run in runs):
            check_blocks((first, first + count - 1), self._num_sender_blocks, "the sender's KV cache")

        def is_stopped() -> bool:
            """Raises instead of returning True."""
            self._channel.check_open()
            remaining_s(deadline_s)
            return False

        self._copier.copy("load", runs, None, is_stopped)

    def close(self) -> None:
        self._open_things.close()

    def _map(self, memory: HostMemory | DeviceMemory, part: torch.Tensor) -> Copier:
        if isinstance(memory, HostMemory):
            theirs = shared_memory.attach(memory).reshape(-1, part.shape[1])
            return HostCopier(part, theirs, NUM_THREADS)
        cuda.use(part.device)
        driver = cuda_ipc.CudaDriver()
        base = driver.map(memory)
        self._open_things.callback(_unmap, driver, base)
        return CudaCopier(part, base + memory.offset)


def _check_alike(memory: HostMemory | DeviceMemory, part: torch.Tensor) -> None:
    if isinstance(memory, DeviceMemory) != part.is_cuda:
        raise ConnectionError(f"the sender's blocks are in {type(memory).__name__}, those to fill are not")
    if memory.num_bytes % part.shape[1]:
        raise ConnectionError(f"the sender has {memory.num_bytes} bytes, in blocks of {part.shape[1]}")


def _unmap(driver: cuda_ipc.CudaDriver, base: int) -> None:
    """Unmaps the memory. An error is only logged: the sender may be gone, and this must not delay the outcome of a
    pull."""
    try:
        driver.unmap(base)
    except RuntimeError as error:
        logger.warning("a sender's memory stays mapped: %s", error)
