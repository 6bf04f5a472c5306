"""How blocks get from one end to the other: the interface that `TransferSession` and `SenderConnection` use.

`group_path.py`: both ends move them together. `ipc.py`: the receiver copies them out of the sender's memory. Each
connection has two ends of its own, used by its two threads. Their methods raise what `failures.py` lists.
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
    # Whether the sender answers `Pulled`, so that the blocks count as pulled only then.
    is_confirmed: bool

    def open(self, channel: Channel, deadline_s: float) -> None:
        """Sends `Opened` to a receiver that is admitted, and returns when blocks can be sent to it."""

    def send(self, runs: Sequence[Run]) -> None:
        """Starts to send and returns at once. The blocks are in use until the receiver has sent `Pulled`, or until
        `close`."""

    def close(self) -> None:
        """Ends the path: it reads no block after this. Safe before `open`, and after `open` failed."""


class ReceiverEnd(Protocol):
    is_confirmed: bool

    def open(self, channel: Channel, opened: Opened, deadline_s: float) -> None:
        """Opens the path, after `Opened` has come; returns when blocks can be pulled."""

    def pull(self, runs: Sequence[Run], deadline_s: float) -> None:
        """Pulls the blocks; all of them are there when it returns. If it raises, `close` must be called next."""

    def close(self) -> None:
        """Ends the path: it writes to no block after this. Safe before `open`, and after `open` failed."""


def sender_ends(transport: str, parts: Sequence[torch.Tensor]) -> Callable[[], SenderEnd]:
    """Returns a function that makes a sender's end for each connection. `parts` are the sender's blocks, of each rank,
    as bytes. Raises RuntimeError if this transport can't send them."""
    if transport == "ipc":
        memories = [ipc.describe(part) for part in parts]
        return lambda: ipc.IpcSender(memories)
    return lambda: GroupSender(transport, parts)


def receiver_end(transport: str, parts: Sequence[torch.Tensor]) -> ReceiverEnd:
    return ipc.IpcReceiver(parts) if transport == "ipc" else GroupReceiver(transport, parts)


def allocator(transport: str) -> Callable[..., torch.Tensor]:
    """Returns the function, called like torch.empty, with which a sender's blocks must be allocated."""
    return shared_memory.empty if transport == "ipc" else torch.empty
