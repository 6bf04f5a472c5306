"""How blocks get from one end to the other: what `TransferSession` and `SenderConnection` need of a way, and all ways.

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
    # whether the sender answers `Pulled`, and the blocks count as pulled only then
    is_confirmed: bool

    def open(self, channel: Channel, deadline_s: float) -> None:
        """Says `Opened` to a receiver that is let in, and returns when blocks can be sent to it."""

    def send(self, runs: Sequence[Run]) -> None:
        """Returns at once. The blocks are in use until the receiver says that it has them all, or until `close`."""

    def close(self) -> None:
        """Nothing here reads any block after this. Safe before `open`, and after it failed."""


class ReceiverEnd(Protocol):
    is_confirmed: bool

    def open(self, channel: Channel, opened: Opened, deadline_s: float) -> None:
        """Called after `Opened` has come; it returns when blocks can be pulled."""

    def pull(self, runs: Sequence[Run], deadline_s: float) -> None:
        """All blocks are there when it returns. If it raises, `close` comes next."""

    def close(self) -> None:
        """Nothing writes to any block after this. Safe before `open`, and after it failed."""


def sender_ends(transport: str, blocks: torch.Tensor) -> Callable[[], SenderEnd]:
    """Returns what makes an end for each connection. `blocks` are the sender's, as bytes. Raises RuntimeError if they
    can't be sent so."""
    if transport == "ipc":
        memory = ipc.describe(blocks)
        return lambda: ipc.IpcSender(memory)
    return lambda: GroupSender(transport, blocks)


def receiver_end(transport: str, blocks: torch.Tensor) -> ReceiverEnd:
    return ipc.IpcReceiver(blocks) if transport == "ipc" else GroupReceiver(transport, blocks)


def allocator(transport: str) -> Callable[..., torch.Tensor]:
    """Returns what a sender's blocks have to be made with; it is called like torch.empty."""
    return shared_memory.empty if transport == "ipc" else torch.empty
