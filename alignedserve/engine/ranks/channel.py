"""Messages between the leading rank and another one, over a private socket.

A message is 4 bytes of length, one byte for its kind, and its contents: JSON at start-up, plain int32 for steps. No
content comes from a client, and none is executed.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

_LENGTH_BYTES = 4


class Kind(IntEnum):
    # From the leading rank.
    START = 0
    MEASURE = 1
    CACHE = 2
    FORWARD = 3
    LOGITS = 4
    # From the others.
    LOADED = 5
    MEASURED = 6
    READY = 7
    FAILED = 8


class ChannelClosed(ConnectionError):
    """The other end has closed the connection."""


class RankChannel:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, kind: Kind, data: bytes = b"") -> None:
        head = (1 + len(data)).to_bytes(_LENGTH_BYTES, "little") + bytes([kind])
        try:
            self._sock.sendall(head + data)
        except OSError as error:
            raise ChannelClosed(f"the other rank has closed the connection: {error}") from error

    def send_json(self, kind: Kind, value: Mapping[str, Any]) -> None:
        self.send(kind, json.dumps(value).encode())

    def receive(self) -> tuple[Kind, bytes]:
        """Waits for a message. Raises ChannelClosed."""
        length = int.from_bytes(self._receive(_LENGTH_BYTES), "little")
        message = self._receive(length)
        return Kind(message[0]), message[1:]

    def expect(self, kind: Kind) -> bytes:
        """Waits for a message of this kind. Raises ValueError with the other rank's message if it failed, RuntimeError
        for another kind, and ChannelClosed."""
        found, data = self.receive()
        if found is Kind.FAILED:
            raise ValueError(data.decode())
        if found is not kind:
            raise RuntimeError(f"the other rank sent {found.name}, not {kind.name}")
        return data

    def close(self) -> None:
        """Safe to repeat."""
        self._sock.close()

    def _receive(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        view, got = memoryview(data), 0
        while got < num_bytes:
            try:
                more = self._sock.recv_into(view[got:])
            except OSError as error:
                raise ChannelClosed(f"the other rank has closed the connection: {error}") from error
            if not more:
                raise ChannelClosed("the other rank has closed the connection")
            got += more
        return bytes(data)
