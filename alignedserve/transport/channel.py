"""The control connection of a link: what its two ends say to each other, and how each learns that the other is gone.

A frame is four bytes of length, then msgpack. The blocks themselves do not pass here (`group.py`).

    puller -> lender   Knock                      lender -> puller   Opened | Refused
    puller -> lender   Joining                    both form their process group, in the puller's store
    puller -> lender   Pull                       lender -> puller   Granted, then the blocks | Denied
    puller -> lender   Pulled: they have arrived, the lender may let go of its copy
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass, field

import msgspec

from alignedserve.messages import Message, Refused
from alignedserve.transport.completions import TransferId
from alignedserve.types import BlockId, Epoch, InstanceId, RequestKey

MAX_FRAME_BYTES = 16 << 20


@dataclass(frozen=True)
class Identity:
    """One end of a link, as it introduces itself."""

    instance_id: InstanceId
    epoch: Epoch
    fingerprint: dict[str, str]
    # of the cluster; not shown when an identity is printed
    token: str = field(repr=False)


class Knock(Message):
    # whom it takes the other end for
    wanted: InstanceId
    instance_id: InstanceId
    epoch: Epoch
    fingerprint: dict[str, str]
    token: str


class Opened(Message):
    """May form a process group with the lender, which waits for it to say where."""


class Joining(Message):
    # where the two meet to form their process group: at the puller's host
    store_port: int


class Pull(Message):
    transfer: TransferId
    keys: list[RequestKey]
    # of each key: where its blocks are to go
    blocks: list[list[BlockId]]
    timeout_s: float


class Granted(Message):
    transfer: TransferId
    # (first block at the puller, number of blocks), in the order in which they will be sent
    runs: list[tuple[int, int]]


class Denied(Message):
    transfer: TransferId
    reason: str


class Pulled(Message):
    transfer: TransferId


Frame = Knock | Opened | Refused | Joining | Pull | Granted | Denied | Pulled
_DECODER: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)
_ENCODER = msgspec.msgpack.Encoder()


class Channel:
    """Belongs to one thread; any thread may call `shut`. Raises OSError or msgspec.MsgspecError when it fails."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock

    def send(self, frame: Frame, deadline_s: float) -> None:
        data = _ENCODER.encode(frame)
        self.sock.settimeout(remaining_s(deadline_s))
        self.sock.sendall(len(data).to_bytes(4) + data)

    def receive(self, deadline_s: float | None = None) -> Frame:
        num_bytes = int.from_bytes(self._receive_bytes(4, deadline_s))
        if num_bytes > MAX_FRAME_BYTES:
            raise ConnectionError(f"a frame of {num_bytes} bytes; at most {MAX_FRAME_BYTES} are allowed")
        return _DECODER.decode(self._receive_bytes(num_bytes, deadline_s))

    def check_open(self) -> None:
        """Never waits; leaves what has arrived where it is."""
        self.sock.settimeout(None)
        try:
            if not self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                raise ConnectionError("the other end is gone")
        except BlockingIOError:
            return

    def shut(self) -> None:
        """Wakes the thread that is waiting in it. Safe to repeat."""
        shut(self.sock)

    def close(self) -> None:
        self.sock.close()

    def _receive_bytes(self, num_bytes: int, deadline_s: float | None) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            self.sock.settimeout(None if deadline_s is None else remaining_s(deadline_s))
            piece = self.sock.recv(num_bytes - len(data))
            if not piece:
                raise ConnectionError("the other end is gone")
            data += piece
        return bytes(data)


def remaining_s(deadline_s: float) -> float:
    remaining = deadline_s - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("its deadline passed")
    return remaining


def shut(sock: socket.socket) -> None:
    """Both ways, at once; a socket that is closed or not connected any more is left as it is."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
