"""The path of the blocks between the two ends: the interface for `TransferSession` and `SenderConnection`.

In `group_path.py`, both ends move the blocks together. In `ipc.py`, the receiver copies them out of the sender's
memory. Each connection has its own pair of ends, used by its two threads. Their methods raise the errors in
`failures.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from alignedserve.transport import ipc, shared_memory
from alignedserve.transport.channel import Channel, Opened
from alignedserve.transport.group_path import GroupReceiver, GroupSender
from alignedserve.transport.runs import Run


class SenderEnd(Protocol):
    # Whether the sender answers `Pulled`. If so, the blocks count as pulled only after the answer.
    is_confirmed: bool

    def open(self, channel: Channel, deadline_s: float) -> None:
        """Sends `Opened` to an admitted receiver. Returns when blocks can be sent."""

    def send(self, runs: Sequence[Run]) -> None:
        """Starts sending and returns immediately. The blocks are in use until the receiver has sent `Pulled`, or until
        `close`."""

    def close(self) -> None:
        """Closes the path. No block is read after this. Safe before `open`, and after a failed `open`."""


class ReceiverEnd(Protocol):
    is_confirmed: bool

    def open(self, channel: Channel, opened: Opened, deadline_s: float) -> None:
        """Opens the path after `Opened` has arrived. Returns when blocks can be pulled."""

    def pull(self, runs: Sequence[Run], deadline_s: float) -> None:
        """Returns when all blocks have arrived. If it raises, `close` must be called next."""

    def close(self) -> None:
        """Closes the path. No block is written after this. Safe before `open`, and after a failed `open`."""


def sender_ends(transport: str, parts: Sequence[torch.Tensor]) -> Callable[[], SenderEnd]:
    """Returns a function that makes a sender's end for each connection. `parts` are the sender's blocks as bytes, per
    rank. Raises RuntimeError if this transport can't send them."""
    if transport == "ipc":
        memories = [ipc.describe(part) for part in parts]
        return lambda: ipc.IpcSender(memories)
    return lambda: GroupSender(transport, parts)


def receiver_end(transport: str, parts: Sequence[torch.Tensor]) -> ReceiverEnd:
    return ipc.IpcReceiver(parts) if transport == "ipc" else GroupReceiver(transport, parts)


def allocator(transport: str) -> Callable[..., torch.Tensor]:
    """Returns the allocator for a sender's blocks, with the signature of torch.empty."""
    return shared_memory.empty if transport == "ipc" else torch.empty
