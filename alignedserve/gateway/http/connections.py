"""Limits the number of open connections, and chooses which one is closed for a new one.

There is one limit for all clients: behind a proxy they all have the same address, so a limit per address would be
useless. A client that opens many connections without sending takes no places from others. The connection idle longest
is closed first, then the one that has waited longest for its client in the middle of a request. A connection is never
closed while its request is being answered.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from enum import Enum, auto
from itertools import islice
from typing import Protocol

from alignedserve.gateway.limits.few_at_once import FewAtOnce

# Connections that are read in a turn of the event loop. A piece of 64 KiB takes 0.2 to 0.4 ms on a 2.5 GHz core, all
# its processing included.
MAX_PIECES_A_ROUND = 4


class SocketReader(Protocol):
    def read_on(self) -> None: ...


class ReaderQueue:
    def __init__(self) -> None:
        # Waiting readers in order of arrival.
        self._waiting: dict[SocketReader, None] = {}

    def wait(self, reader: SocketReader) -> None:
        """Calls the reader to continue in a later turn of the event loop."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._next_round)
        self._waiting[reader] = None

    def leave(self, reader: SocketReader) -> None:
        """Forgets the reader. Safe to repeat."""
        self._waiting.pop(reader, None)

    def _next_round(self) -> None:
        for reader in list(islice(self._waiting, MAX_PIECES_A_ROUND)):
            del self._waiting[reader]
            reader.read_on()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next_round)


logger = logging.getLogger(__name__)

# All connections are read into one buffer of this size. Its contents are copied out at once.
READ_BYTES = 64 << 10
# Requests that begin in a turn of the event loop, and streams that end in one because their clients have disconnected,
# at most. Either takes up to a millisecond on a 2.5 GHz core, with all that follows.
MAX_BEGUN_AT_ONCE, MAX_LOST_AT_ONCE = 4, 8
# Share of the file descriptors for connections. The store, the routers and Ray need the rest.
DESCRIPTORS_SHARE = 0.75


class Doing(Enum):
    # Waits for a request, or for the rest of its head.
    IDLE = auto()
    # Waits for more of a body, or for its client to read the answer.
    STALLED = auto()
    ANSWERING = auto()


class Closable(Protocol):
    def abort(self) -> None: ...


class Connections:
    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        # The state of each connection; and for each state, its connections, in the order in which they entered it.
        self._doing: dict[Closable, Doing] = {}
        self._by_doing: dict[Doing, dict[Closable, None]] = {doing: {} for doing in Doing}
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        self.reads = ReaderQueue()
        self.beginnings = FewAtOnce(MAX_BEGUN_AT_ONCE)
        self.losses = FewAtOnce(MAX_LOST_AT_ONCE)
        # Whether each connection closes after its next answer, which announces that.
        self.is_retiring = False

    def __len__(self) -> int:
        return len(self._doing)

    def begin(self, connection: Closable) -> bool:
        """Counts a new connection, which is idle. Returns False if there is no place: all others are being answered."""
        if len(self) >= self._max_connections and not self._close_one():
            return False
        self._doing[connection] = Doing.IDLE
        self._by_doing[Doing.IDLE][connection] = None
        return True

    def note(self, connection: Closable, doing: Doing) -> None:
        """Records the state of a connection. Safe to repeat, and for one that was not admitted."""
        before = self._doing.get(connection, doing)
        if before is not doing:
            del self._by_doing[before][connection]
            self._by_doing[doing][connection] = None
            self._doing[connection] = doing

    def end(self, connection: Closable) -> None:
        """Stops counting a connection. Safe to repeat."""
        doing = self._doing.pop(connection, None)
        if doing is not None:
            del self._by_doing[doing][connection]

    def _close_one(self) -> bool:
        for doing in (Doing.IDLE, Doing.STALLED):
            for connection in self._by_doing[doing]:
                self.end(connection)
                connection.abort()
                return True
        return False


def fitting(max_connections: int) -> int:
    """Returns `max_connections`, reduced to what the file descriptors allow. With none left, no connection could be
    accepted."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return max_connections
    num_possible = max(int(soft * DESCRIPTORS_SHARE), 1)
    if num_possible < max_connections:
        message = (
            "connections: limited to %d, because this process may open %d files (ulimit -n); configured: %d"
        )
        logger.warning(message, num_possible, soft, max_connections)
    return min(max_connections, num_possible)


def allow_descriptors(max_connections: int) -> None:
    """Raises this process's limit of open files for `max_connections`, as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = int(max_connections / DESCRIPTORS_SHARE) + 1
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
