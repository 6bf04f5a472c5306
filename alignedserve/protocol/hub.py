"""The router's end of the connections: a listening socket, and the process at the other end of each connection.

A connection is unproven until its process has shown that it knows the token. It belongs to no process until the first
message, a Hello, has been accepted. The number of such connections is limited, and the oldest is closed for a new one.
For each process the handler's `connected` is called first, then `received`, then `closed`. Only then is `connected`
called for its next connection, or for its next role on the same one.

The death of a process closes its connection, but a hanging process keeps it open. So every process is pinged, and
disconnected if it does not answer. Unanswered pings are counted, not seconds: if this process itself has hung, that
must not count against the others. An instance answers on a separate thread, even while it computes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Protocol

from alignedserve.protocol.address import check_unused
from alignedserve.protocol.connection import NUM_PINGS
from alignedserve.protocol.frames import MAX_FRAME_BYTES
from alignedserve.protocol.handshake import ServerHandshake
from alignedserve.protocol.host import Host, Link, LiveHost, Timer
from alignedserve.protocol.messages import ROLES, AnyMessage, Hello, Message, Ping, Pong, Refused
from alignedserve.protocol.peer import Peer
from alignedserve.protocol.versions import RULE, work_together
from alignedserve.types import ISLAND_GATEWAY, Epoch, InstanceId, is_island_gateway, without_generation
from alignedserve.version import __version__

logger = logging.getLogger(__name__)

# Seconds within which a new connection needs an accepted Hello.
HELLO_TIMEOUT_S = 10.0
# The most connections without a Hello. After the router's death all of an island's processes may connect at once, and
# each handshake takes milliseconds.
MAX_STRANGERS = 256
SILENCE_S = 10.0
# Seconds after which a process that has connected too early is disconnected.
PUT_OFF_S = 0.25
# The most bytes in a frame, for roles with small messages. Other roles send prompts and lists of blocks.
_MAX_FRAME_BYTES = {"launcher": 1 << 16}


class Handler(Protocol):
    def connected(self, hello: Hello) -> None: ...

    def received(self, hello: Hello, message: AnyMessage) -> None: ...

    def closed(self, instance_id: InstanceId, epoch: Epoch) -> None: ...


class Hub:
    def __init__(
        self,
        token: str,
        handler: Handler,
        silence_s: float = SILENCE_S,
        on_silent: Callable[[Hello], None] = lambda hello: None,
        members: Mapping[InstanceId, str] | None = None,
        puts_off: Callable[[Hello], bool] = lambda hello: False,
        interchangeable: Collection[str] = (),
        host: Host | None = None,
    ) -> None:
        """`on_silent` may end a process that has not answered for `silence_s` seconds; shortly after, it is
        disconnected. `members` are the instances that may connect, with their roles; None: every process that knows the
        token. `puts_off` returns whether a process has connected too early: it is then disconnected, and retries. A
        member with one of the `interchangeable` roles may switch to another of them."""
        self._host = host or LiveHost()
        self._interchangeable = frozenset(interchangeable)
        self._token = token
        self._members = members
        self._handler = handler
        self._puts_off = puts_off
        self._ping_s = silence_s / NUM_PINGS
        self._on_silent = on_silent
        self._pinging: Timer | None = None
        self._server: asyncio.Server | None = None
        # Connections without a Hello, the oldest first.
        self._strangers: dict[Link, Timer] = {}
        self._hellos: dict[Link, Hello] = {}
        self._peers: dict[InstanceId, Link] = {}

    async def listen(self, host: str, port: int) -> int:
        """Starts to listen and returns the port, which differs from `port` if that is 0. Raises OSError if the port is
        taken."""
        self._server = await asyncio.get_running_loop().create_server(self._new_peer, host, port)
        self.ping()
        return int(self._server.sockets[0].getsockname()[1])

    async def listen_unix(self, path: str) -> None:
        """Listens on the socket, and replaces one that a dead router has left behind. Raises OSError if another process
        listens there."""
        check_unused(path)
        self._server = await asyncio.get_running_loop().create_unix_server(self._new_peer, path)
        os.chmod(path, 0o600)
        self.ping()

    def ping(self) -> None:
        """Pings every process, again and again. Listening begins it."""
        self._pinging = self._host.after(self._ping_s, self.ping)
        for peer, hello in list(self._hellos.items()):
            peer.num_unanswered += 1
            if peer.num_unanswered <= NUM_PINGS:
                peer.send(Ping())
            elif peer.num_unanswered == NUM_PINGS + 1:
                logger.warning("%s hangs: %d pings without an answer", peer.name, NUM_PINGS)
                self._on_silent(hello)
            else:
                peer.abort()

    def __contains__(self, name: object) -> bool:
        return name in self._peers

    def send(self, to: InstanceId, message: Message) -> None:
        """Sends the message. It is lost if `to` is not connected; the handler was notified of that, or will be."""
        if to in self._peers:
            self._peers[to].send(message)

    def close(self) -> None:
        """Closes all connections after sending the pending messages."""
        if self._server:
            self._server.close()
        if self._pinging:
            self._pinging.cancel()
        for peer in [*self._strangers, *self._hellos]:
            peer.close()

    def __iter__(self) -> Iterator[Hello]:
        """Yields the Hellos of the connected processes."""
        return iter(self._hellos.values())

    def _new_peer(self) -> Peer:
        return Peer(ServerHandshake(self._token), self.received, self.lost, self.opened)

    # ---- callbacks of connections ----

    def opened(self, peer: Link) -> None:
        if len(self._strangers) >= MAX_STRANGERS:
            self._turn_away(next(iter(self._strangers)))
        self._strangers[peer] = self._host.after(HELLO_TIMEOUT_S, partial(self._turn_away, peer))

    def received(self, peer: Link, message: AnyMessage) -> None:
        if peer in self._hellos:
            if isinstance(message, Hello):
                self._hello_again(peer, message)
            elif not isinstance(message, Pong):
                self._handler.received(self._hellos[peer], message)
        elif peer in self._strangers:
            self._first_message(peer, message)

    def lost(self, peer: Link) -> None:
        if timeout := self._strangers.pop(peer, None):
            timeout.cancel()
        hello = self._hellos.pop(peer, None)
        if hello:
            del self._peers[hello.instance_id]
            self._handler.closed(hello.instance_id, hello.epoch)

    # ---- strangers, and those that have sent Hello ----

    def _turn_away(self, stranger: Link) -> None:
        self._strangers.pop(stranger).cancel()
        stranger.abort()

    def _first_message(self, peer: Link, message: AnyMessage) -> None:
        self._strangers.pop(peer).cancel()
        if not isinstance(message, Hello):
            self._refuse(peer, f"the first message is a {type(message).__name__}, must be a Hello")
        elif objection := self._objection(message):
            self._refuse(peer, objection)
        elif self._puts_off(message):
            self._host.after(PUT_OFF_S, peer.abort)
        elif older := self._peers.get(message.instance_id):
            # It has reconnected before the loss of its last connection was noticed. That loss must be handled before
            # anything acts on the new connection (see `Peer.connection_lost`), so the process has to connect again.
            older.abort()
            peer.abort()
        else:
            self._take(peer, message)

    def _hello_again(self, peer: Link, hello: Hello) -> None:
        """Handles an instance's change of role. To the handler it is another process."""
        before = self._hellos[peer]
        if hello.instance_id != before.instance_id:
            self._refuse(
                peer, f"{before.instance_id}: changed its name to {hello.instance_id}, which is not allowed"
            )
        elif objection := self._objection(hello):
            self._refuse(peer, objection)
        else:
            self._hellos[peer] = hello
            self._handler.closed(before.instance_id, before.epoch)
            self._handler.connected(hello)

    def _refuse(self, peer: Link, reason: str) -> None:
        logger.warning("Refused a connection: %s", reason)
        peer.send(Refused(reason))
        peer.close()

    def _take(self, peer: Link, hello: Hello) -> None:
        peer.name = hello.instance_id
        peer.limit(_MAX_FRAME_BYTES.get(hello.role, MAX_FRAME_BYTES))
        self._hellos[peer], self._peers[hello.instance_id] = hello, peer
        self._handler.connected(hello)

    def _objection(self, hello: Hello) -> str | None:
        if not work_together(__version__, hello.version):
            return f"{hello.instance_id}: is version {hello.version}, and this process {__version__}; {RULE}"
        if hello.role not in ROLES:
            return f"{hello.instance_id}: role={hello.role!r}: must be one of {', '.join(ROLES)}"
        if self._members is not None and not self._may_be(self._members.get(_member(hello)), hello.role):
            return f"{hello.instance_id}: there is no {hello.role} with this name here"
        older = self._peers.get(hello.instance_id)
        if older and self._hellos[older].epoch > hello.epoch:
            return (
                f"{hello.instance_id}: epoch {hello.epoch} is over, {self._hellos[older].epoch} is connected"
            )
        return difference(hello, self._hellos.values())

    def _may_be(self, role: str | None, now: str) -> bool:
        return role == now or {role, now} <= self._interchangeable


def _member(hello: Hello) -> InstanceId:
    """Returns the name in `members` for this process. A gateway that replaces another has a generation in its name, and
    a gateway on an island's host has the island's number."""
    if hello.role != "gateway":
        return hello.instance_id
    return ISLAND_GATEWAY if is_island_gateway(hello.instance_id) else without_generation(hello.instance_id)


def difference(hello: Hello, others: Iterable[Hello]) -> str | None:
    """Returns, as text, the first difference between fingerprints that must be equal everywhere; None if they are."""
    for other in others:
        if other.instance_id == hello.instance_id:
            continue
        for name in sorted(hello.fingerprint.keys() & other.fingerprint.keys()):
            mine, theirs = hello.fingerprint[name], other.fingerprint[name]
            if mine != theirs:
                return f"{hello.instance_id}: {name} is {mine}, but {theirs} at {other.instance_id}"
    return None
