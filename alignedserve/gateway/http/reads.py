"""Decides which sockets are read in a turn of the event loop if many clients send large bodies at once.

The event loop reads from each socket that has data before it continues. With a hundred bodies arriving, that takes tens
of milliseconds, and a token of a stream waits for several such turns. So a connection that has filled the buffer is
read again when its turn comes: a few connections per turn of the loop, in order of arrival.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Protocol

# Connections that are read in a turn of the event loop. A piece of 64 KiB takes 0.2 to 0.4 ms on a 2.5 GHz core, all
# its processing included.
MAX_PIECES_A_ROUND = 4


class Reader(Protocol):
    def read_on(self) -> None: ...


class Reads:
    def __init__(self) -> None:
        # Waiting readers in order of arrival.
        self._waiting: dict[Reader, None] = {}

    def wait(self, reader: Reader) -> None:
        """Calls the reader to continue in a later turn of the event loop."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._next_round)
        self._waiting[reader] = None

    def leave(self, reader: Reader) -> None:
        """Forgets the reader. Safe to repeat."""
        self._waiting.pop(reader, None)

    def _next_round(self) -> None:
        for reader in list(islice(self._waiting, MAX_PIECES_A_ROUND)):
            del self._waiting[reader]
            reader.read_on()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next_round)
