"""The router's end of the connections: a listening socket, and the process at the other end of each connection.

A connection is unproven until it has shown that it knows the token, and belongs to no process until its first message,
a Hello, has been accepted. The number of such connections is limited; the oldest is closed for a new one. For each
process the handler's `connected` is called first, then `received`, then `closed`; only after that `connected` for its
next connection, or for its next role on the same one.

The death of a process closes its connection; a process that hangs keeps it open. So every process is pinged, and cut
off if it answers nothing. Unanswered pings are counted, not seconds: if this process itself had hung, others would not
be blamed for it. An instance answers from a thread of its own, beside compute.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Protocol

from alignedserve.protocol.address import check_unused
from alignedserve.protocol.connection import NUM_PINGS
from alignedserve.protocol.frames import MAX_FRAME_BYTES
from alignedserve.protocol.handshake import ServerHandshake
from alignedserve.protocol.messages import ROLES, AnyMessage, Hello, Message, Ping, Pong, Refused
from alignedserve.protocol.peer import Peer
from alignedserve.types import ISLAND_GATEWAY, Epoch, InstanceId, is_island_gateway, without_generation

logger = logging.getLogger(__name__)

# The seconds that a connection has for an accepted Hello.
HELLO_TIMEOUT_S = 10.0
# The most connections without a Hello. All of an island's processes may be back at once after the router's death, and
# each handshake takes milliseconds.
MAX_STRANGERS = 256
SILENCE_S = 10.0
# The seconds after which a process that comes too soon is disconnected.
PUT_OFF_S = 0.25
# The most bytes of a frame, for roles whose messages are small; the others send prompts and lists of blocks.
_MAX_FRAME_BYTES = {"launcher": 1 << 12}


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
    ) -> None:
        """`on_silent` may end a process which has answered nothing for `silence_s` seconds; a moment later it is cut
        off. `members` are the instances that may connect, with their roles; None: all processes that know the token.
        `puts_off` says whether a process comes too soon: it is disconnected, and comes again. A member with one of the
        `interchangeable` roles may have another of them."""
        self._interchangeable = frozenset(interchangeable)
        self._token = token
        self._members = members
        self._handler = handler
        self._puts_off = puts_off
        self._ping_s = silence_s / NUM_PINGS
        self._on_silent = on_silent
        self._pinging: asyncio.TimerHandle | None = None
        self._server: asyncio.Server | None = None
        # The connections whose Hello has not come yet, the oldest first.
        self._strangers: dict[Peer, asyncio.TimerHandle] = {}
        self._hellos: dict[Peer, Hello] = {}
        self._peers: dict[InstanceId, Peer] = {}

    async def listen(self, host: str, port: int) -> int:
        """Starts to listen and returns the port, which differs from `port` if that is 0. Raises OSError when it is
        taken."""
        self._server = await asyncio.get_running_loop().create_server(self._new_peer, host, port)
        self._ping()
        return int(self._server.sockets[0].getsockname()[1])

    async def listen_unix(self, path: str) -> None:
        """Listens on the socket, in place of one that a dead router has left. Raises OSError when another process
        listens there."""
        check_unused(path)
        self._server = await asyncio.get_running_loop().create_unix_server(self._new_peer, path)
        os.chmod(path, 0o600)
        self._ping()

    def send(self, to: InstanceId, message: Message) -> None:
        """Sends the message, which is lost when `to` is not connected; the handler has been told so, or will be."""
        if to in self._peers:
            self._peers[to].send(message)

    def close(self) -> None:
        """Closes all connections, after the messages that were sent."""
        if self._server:
            self._server.close()
        if self._pinging:
            self._pinging.cancel()
        for peer in [*self._strangers, *self._hellos]:
            peer.close()

    def __iter__(self) -> Iterator[Hello]:
        """Yields the Hellos of connected processes."""
        return iter(self._hellos.values())

    def _new_peer(self) -> Peer:
        return Peer(ServerHandshake(self._token), self._message, self._lost, self._opened)

    def _opened(self, peer: Peer) -> None:
        if len(self._strangers) >= MAX_STRANGERS:
            self._turn_away(next(iter(self._strangers)))
        loop = asyncio.get_running_loop()
        self._strangers[peer] = loop.call_later(HELLO_TIMEOUT_S, self._turn_away, peer)

    def _turn_away(self, stranger: Peer) -> None:
        self._strangers.pop(stranger).cancel()
        stranger.abort()

    def _ping(self) -> None:
        self._pinging = asyncio.get_running_loop().call_later(self._ping_s, self._ping)
        for peer, hello in list(self._hellos.items()):
            peer.num_unanswered += 1
            if peer.num_unanswered <= NUM_PINGS:
                peer.send(Ping())
            elif peer.num_unanswered == NUM_PINGS + 1:
                logger.warning("%s hangs: it has answered %d pings with nothing", peer.name, NUM_PINGS)
                self._on_silent(hello)
            else:
                peer.abort()

    def _message(self, peer: Peer, message: AnyMessage) -> None:
        if peer in self._hellos:
            if isinstance(message, Hello):
                self._hello_again(peer, message)
            elif not isinstance(message, Pong):
                self._handler.received(self._hellos[peer], message)
        elif peer in self._strangers:
            self._first_message(peer, message)

    def _first_message(self, peer: Peer, message: AnyMessage) -> None:
        self._strangers.pop(peer).cancel()
        if not isinstance(message, Hello):
            self._refuse(peer, f"the first message is a {type(message).__name__}, must be a Hello")
        elif objection := self._objection(message):
            self._refuse(peer, objection)
        elif self._puts_off(message):
            asyncio.get_running_loop().call_later(PUT_OFF_S, peer.abort)
        elif older := self._peers.get(message.instance_id):
            # It is back before the loss of its last connection was noticed, which has to be over before anything acts
            # on it: see `Peer.connection_lost`. Then it comes again.
            older.abort()
            peer.abort()
        else:
            self._take(peer, message)

    def _hello_again(self, peer: Peer, hello: Hello) -> None:
        """An instance has taken another role. To the handler that is another process."""
        before = self._hellos[peer]
        if hello.instance_id != before.instance_id:
            self._refuse(peer, f"{before.instance_id}: calls itself {hello.instance_id} now")
        elif objection := self._objection(hello):
            self._refuse(peer, objection)
        else:
            self._hellos[peer] = hello
            self._handler.closed(before.instance_id, before.epoch)
            self._handler.connected(hello)

    def _refuse(self, peer: Peer, reason: str) -> None:
        logger.warning("Refused a connection: %s", reason)
        peer.send(Refused(reason))
        peer.close()

    def _take(self, peer: Peer, hello: Hello) -> None:
        peer.name = hello.instance_id
        peer.limit(_MAX_FRAME_BYTES.get(hello.role, MAX_FRAME_BYTES))
        self._hellos[peer], self._peers[hello.instance_id] = hello, peer
        self._handler.connected(hello)

    def _objection(self, hello: Hello) -> str | None:
        if hello.role not in ROLES:
            return f"{hello.instance_id}: role={hello.role!r}: must be one of {', '.join(ROLES)}"
        if self._members is not None and not self._may_be(self._members.get(_member(hello)), hello.role):
            return f"{hello.instance_id}: there is no {hello.role} of this name here"
        older = self._peers.get(hello.instance_id)
        if older and self._hellos[older].epoch > hello.epoch:
            return (
                f"{hello.instance_id}: epoch {hello.epoch} is over, {self._hellos[older].epoch} is connected"
            )
        return difference(hello, self._hellos.values())

    def _may_be(self, role: str | None, now: str) -> bool:
        return role == now or {role, now} <= self._interchangeable

    def _lost(self, peer: Peer) -> None:
        if timeout := self._strangers.pop(peer, None):
            timeout.cancel()
        hello = self._hellos.pop(peer, None)
        if hello:
            del self._peers[hello.instance_id]
            self._handler.closed(hello.instance_id, hello.epoch)


def _member(hello: Hello) -> InstanceId:
    """A gateway that takes another one's place has the name of its generation, and one on an island's host the island's
    number."""
    if hello.role != "gateway":
        return hello.instance_id
    return ISLAND_GATEWAY if is_island_gateway(hello.instance_id) else without_generation(hello.instance_id)


def difference(hello: Hello, others: Iterable[Hello]) -> str | None:
    """Returns the first difference, as text, between fingerprints that must be equal everywhere; None if there is
    none."""
    for other in others:
        if other.instance_id == hello.instance_id:
            continue
        for name in sorted(hello.fingerprint.keys() & other.fingerprint.keys()):
            mine, theirs = hello.fingerprint[name], other.fingerprint[name]
            if mine != theirs:
                return f"{hello.instance_id}: {name} is {mine}, but {theirs} at {other.instance_id}"
    return None
