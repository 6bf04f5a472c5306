"""How many connections are open, and which one is closed in favour of a new one when there are too many.

A limit for each address would be useless behind a proxy, where all clients have the same address, so there is one for
all. A client that opens many connections and sends nothing takes no places from others: the connection that has been
idle longest is closed first, then the one that has waited longest for its client in the middle of a request. A
connection whose request is being answered is never closed.
"""

from __future__ import annotations

import logging
import resource
from enum import Enum, auto
from typing import Protocol

from alignedserve.gateway.few_at_once import FewAtOnce
from alignedserve.gateway.http.reads import Reads

logger = logging.getLogger(__name__)

# All connections are read into one buffer of this size: what arrives is copied out of it at once.
READ_BYTES = 64 << 10
# The most requests that begin in a turn of the event loop, and the most streams that end in one because their clients
# hung up. Either takes up to a millisecond on a core of 2.5 GHz, with all that follows from it.
MAX_BEGUN_AT_ONCE, MAX_LOST_AT_ONCE = 4, 8
# Connections may have this share of the file descriptors: the rest is for the store, the routers and Ray.
DESCRIPTORS_SHARE = 0.75


class Doing(Enum):
    # The connection waits for a request, or for the rest of its head.
    IDLE = auto()
    # The connection waits for more of a body, or for its client to read the answer.
    STALLED = auto()
    ANSWERING = auto()


class Closable(Protocol):
    def abort(self) -> None: ...


class Connections:
    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        # What each connection does; and for each of these, the connections in the order in which they began it.
        self._doing: dict[Closable, Doing] = {}
        self._by_doing: dict[Doing, dict[Closable, None]] = {doing: {} for doing in Doing}
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        self.reads = Reads()
        self.beginnings = FewAtOnce(MAX_BEGUN_AT_ONCE)
        self.losses = FewAtOnce(MAX_LOST_AT_ONCE)
        # Whether each connection is closed after its next answer, which says so.
        self.is_retiring = False

    def __len__(self) -> int:
        return len(self._doing)

    def begin(self, connection: Closable) -> bool:
        """Counts a new connection, which is idle. Returns False if there is no room, as all others are being
        answered."""
        if len(self) >= self._max_connections and not self._close_one():
            return False
        self._doing[connection] = Doing.IDLE
        self._by_doing[Doing.IDLE][connection] = None
        return True

    def note(self, connection: Closable, doing: Doing) -> None:
        """Notes what a connection does. Safe to repeat, and for one that was not admitted."""
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
    """`max_connections`, or as many as there are file descriptors for: with none left, no connection would be taken at
    all."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return max_connections
    num_possible = max(int(soft * DESCRIPTORS_SHARE), 1)
    if num_possible < max_connections:
        message = (
            "connections: %d at most, as this process may have %d files open (ulimit -n); %d are asked for"
        )
        logger.warning(message, num_possible, soft, max_connections)
    return min(max_connections, num_possible)


def allow_descriptors(max_connections: int) -> None:
    """Raises this process's limit of open files for so many connections, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = int(max_connections / DESCRIPTORS_SHARE) + 1
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
