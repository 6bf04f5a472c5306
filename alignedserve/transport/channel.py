"""The control connection of transfers: its messages, and how each end notices that the other is gone.

First both ends prove that they have the cluster's token (`protocol/handshake.py`). After that, a frame is four bytes of
length, and msgpack. The blocks themselves take another path (`group.py`, `ipc.py`).

    receiver -> sender   HandshakeRequest           sender -> receiver   Opened | Refused
    receiver -> sender   Joining (gloo, nccl)       both form their process group through the receiver's file
    receiver -> sender   Pull                       sender -> receiver   Granted, then the blocks | Denied
    receiver -> sender   Pulled: the blocks have arrived; the sender may free its copy
                                                    sender -> receiver   Released (ipc): the copy was held until then
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from alignedserve.protocol.handshake import Handshake, digest_of
from alignedserve.protocol.messages import Message, Refused
from alignedserve.transport.completions import TransferId
from alignedserve.transport.runs import Run
from alignedserve.types import BlockId, Epoch, InstanceId, RequestKey

MAX_FRAME_BYTES = 16 << 20
# CU_IPC_HANDLE_SIZE in cuda.h.
IPC_HANDLE_BYTES = 64


@dataclass(frozen=True)
class Identity:
    """The identity that one end of a connection presents."""

    instance_id: InstanceId
    epoch: Epoch
    fingerprint: dict[str, str]
    # The cluster's token, which is left out of repr().
    token: str = field(repr=False)


class HandshakeRequest(Message):
    # The instance that the receiver expects at the sender's end.
    expected: InstanceId
    instance_id: InstanceId
    epoch: Epoch
    fingerprint: dict[str, str]


Count = Annotated[int, msgspec.Meta(ge=0)]


class HostMemory(Message):
    """Blocks in a memory file that the sender has open (`shared_memory.py`)."""

    pid: Count
    fd: Count
    # The file's inode, which tells it from another process's file or a later one.
    inode: Count
    num_bytes: Count


class DeviceMemory(Message):
    """Blocks on a GPU (`cuda_ipc.py`)."""

    # The handle of the driver's whole allocation, and the offset of the blocks in it, in bytes.
    handle: Annotated[bytes, msgspec.Meta(min_length=IPC_HANDLE_BYTES, max_length=IPC_HANDLE_BYTES)]
    offset: Count
    num_bytes: Count


class Opened(Message):
    """The receiver is admitted. The sender names its memory, or waits for Joining."""

    # One per rank; empty if Joining follows.
    memories: tuple[HostMemory | DeviceMemory, ...] = ()


class Joining(Message):
    # Path of the file through which both ends form their process group.
    store: str


class Pull(Message):
    transfer: TransferId
    keys: list[RequestKey]
    # The receiver's blocks to fill, per key; HAS_BLOCK (`runs.py`) for those that it has.
    blocks: list[list[BlockId]]
    timeout_s: float


class Granted(Message):
    transfer: TransferId
    # `here` is in the receiver's blocks, `there` in the sender's. The runs are in the order of sending.
    runs: list[Run]


class Denied(Message):
    transfer: TransferId
    reason: str


class Pulled(Message):
    transfer: TransferId


class Released(Message):
    """The sender held the blocks until Pulled arrived, so the receiver has read their content."""

    transfer: TransferId


Frame = HandshakeRequest | Opened | Refused | Joining | Pull | Granted | Denied | Pulled | Released
_DECODER: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)
_ENCODER = msgspec.msgpack.Encoder()


class Channel:
    """The connection. It belongs to one thread. Any thread may call `shut`, and `check_open` while the owner neither
    sends nor receives. On failure its methods raise OSError or msgspec.MsgspecError."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        # Whether the other end has proved that it has the token.
        self.is_proven = False

    def shake(self, handshake: Handshake, deadline_s: float) -> None:
        """Runs the handshake. Call it before anything else is sent."""
        self._send_bytes(handshake.opening, deadline_s)
        while num_bytes := handshake.num_bytes:
            self._send_bytes(handshake.take(self._receive_bytes(num_bytes, deadline_s)), deadline_s)
        self.is_proven = True

    def send(self, frame: Frame, deadline_s: float) -> None:
        self._send_bytes(encoded(frame), deadline_s)

    def receive(self, deadline_s: float | None = None, digest: bytes = b"") -> Frame:
        """Receives a frame. `digest` is the expected digest, if the handshake provided one."""
        head = self._receive_bytes(4, deadline_s)
        num_bytes = int.from_bytes(head)
        if num_bytes > MAX_FRAME_BYTES:
            raise ConnectionError(f"a frame of {num_bytes} bytes; at most {MAX_FRAME_BYTES} are allowed")
        body = self._receive_bytes(num_bytes, deadline_s)
        if digest and digest != digest_of(head + body):
            raise ConnectionError("the first frame is another than the handshake said")
        return _DECODER.decode(body)

    def check_open(self) -> None:
        """Raises if the other end is gone. Does not wait, and leaves received data in the socket."""
        self.sock.settimeout(None)
        try:
            if not self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                raise ConnectionError("the other end is gone")
        except BlockingIOError:
            return

    def shut(self) -> None:
        """Shuts the connection down, which wakes a thread that waits in it. Safe to repeat."""
        shut(self.sock)

    def close(self) -> None:
        self.sock.close()

    def _send_bytes(self, data: bytes, deadline_s: float) -> None:
        self.sock.settimeout(remaining_s(deadline_s))
        self.sock.sendall(data)

    def _receive_bytes(self, num_bytes: int, deadline_s: float | None) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            self.sock.settimeout(None if deadline_s is None else remaining_s(deadline_s))
            piece = self.sock.recv(num_bytes - len(data))
            if not piece:
                raise ConnectionError("the other end is gone")
            data += piece
        return bytes(data)


def encoded(frame: Frame) -> bytes:
    data = _ENCODER.encode(frame)
    return len(data).to_bytes(4) + data


def remaining_s(deadline_s: float) -> float:
    remaining = deadline_s - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("its deadline passed")
    return remaining


def shut(sock: socket.socket) -> None:
    """Shuts down both directions. Does nothing for a socket that is closed or not connected."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
