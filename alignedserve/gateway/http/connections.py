"""Limits the number of open connections, and chooses which one is closed for a new one.

A connection belongs to the owner of the last API key that it has shown, and until then to its address. So clients
behind a proxy, which all have its address, are told apart by their keys. Room for a new connection is taken from the
holder with the most, and addresses count as one holder beside a key. The connection idle longest is closed first, then
the one that has waited longest for its client in the middle of a request. A connection is never closed for another
while its request waits for an answer, nor before it has been read.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
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
    # Is new and has not been read yet, or has a request to answer.
    BUSY = auto()


class Closable(Protocol):
    def abort(self) -> None: ...


class _Held:
    """The connections of a holder, by state, in the order in which they entered it."""

    def __init__(self) -> None:
        self.by_doing: dict[Doing, dict[Closable, None]] = {doing: {} for doing in Doing}

    def __len__(self) -> int:
        return sum(map(len, self.by_doing.values()))

    @property
    def next_closed(self) -> Closable | None:
        return next(iter(self.by_doing[Doing.IDLE] or self.by_doing[Doing.STALLED]), None)


class _Holders:
    """The holders of a kind. The one with the most is found without a look at each of them."""

    def __init__(self) -> None:
        self.held: dict[str, _Held] = {}
        self.num_connections = 0
        # Holders with a connection that can be closed, by how many they have. With n connections, there are at most
        # sqrt(2 n) different numbers.
        self._closable: dict[int, dict[str, None]] = {}

    def change(self, holder: str, doing: Doing, connection: Closable, is_added: bool) -> None:
        held = self.held.setdefault(holder, _Held())
        if same := self._closable.get(len(held)):
            same.pop(holder, None)
            if not same:
                del self._closable[len(held)]
        if is_added:
            held.by_doing[doing][connection] = None
        else:
            del held.by_doing[doing][connection]
        self.num_connections += 1 if is_added else -1
        if held.next_closed:
            self._closable.setdefault(len(held), {})[holder] = None
        if not held:
            del self.held[holder]

    @property
    def most(self) -> _Held | None:
        """The holder with the most connections, of those with one that can be closed."""
        return self.held[next(iter(self._closable[max(self._closable)]))] if self._closable else None


class Connections:
    def __init__(self, max_connections: int, max_of_address: int | None = None) -> None:
        """`max_of_address`: how many connections of one address may be open that have shown no key."""
        self._max_connections = max_connections
        self._max_of_address = max_of_address or max_connections
        # The holder of each connection, and its state.
        self._open: dict[Closable, tuple[_Holders, str, Doing]] = {}
        self._addresses, self._keys = _Holders(), _Holders()
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        self.reads = ReaderQueue()
        self.beginnings = FewAtOnce(MAX_BEGUN_AT_ONCE)
        self.losses = FewAtOnce(MAX_LOST_AT_ONCE)
        # Whether each connection closes after its next answer, which announces that.
        self.is_retiring = False

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, connection: Closable, address: str) -> bool:
        """Counts a new connection, which is busy until it is read. `address` is from `holder_at`. Returns False if
        there is no place for it: no connection that may be closed for it can be closed."""
        held = self._addresses.held.get(address)
        if held is not None and len(held) >= self._max_of_address:
            has_place = self._close_one_of(held)
        else:
            has_place = len(self) < self._max_connections or self._close_one_of(self._most())
        if has_place:
            self._put(connection, self._addresses, address, Doing.BUSY)
        return has_place

    def hold(self, connection: Closable, holder: str) -> None:
        """Records the holder of a connection: the owner of a key, or still its address. Safe to repeat, and for one
        that was not admitted."""
        if (before := self._open.get(connection)) and before[1] != holder:
            self.end(connection)
            self._put(connection, self._keys, holder, before[2])

    def note(self, connection: Closable, doing: Doing) -> None:
        """Records the state of a connection. Safe to repeat, and for one that was not admitted."""
        if (before := self._open.get(connection)) and before[2] is not doing:
            self.end(connection)
            self._put(connection, before[0], before[1], doing)

    def end(self, connection: Closable) -> None:
        """Stops counting a connection. Safe to repeat."""
        if before := self._open.pop(connection, None):
            holders, holder, doing = before
            holders.change(holder, doing, connection, is_added=False)

    def _put(self, connection: Closable, holders: _Holders, holder: str, doing: Doing) -> None:
        self._open[connection] = holders, holder, doing
        holders.change(holder, doing, connection, is_added=True)

    def _most(self) -> _Held | None:
        address, key = self._addresses.most, self._keys.most
        if address is None or key is None:
            return address or key
        return address if self._addresses.num_connections >= len(key) else key

    def _close_one_of(self, held: _Held | None) -> bool:
        if held is None or (connection := held.next_closed) is None:
            return False
        self.end(connection)
        connection.abort()
        return True


def holder_at(address: str) -> str:
    """Returns the name of the holder of connections from an address that have shown no key. The holder of
    an IPv6 address has all of its /64."""
    if ":" in address:
        address = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])[:8].hex()
    return f"address {address}"


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
