"""The listening socket of gateways. The launcher holds it as well and passes it to each gateway that it starts. So
clients that connect during a restart wait, and a new gateway can replace one that is still finishing its answers. On an
island's host, which has no launcher, one gateway passes the socket to the next."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence

# The most connections that wait in the kernel to be accepted.
MAX_WAITING = 2048
# Request for the socket.
ASK_LISTENER = b"listener\n"
# Timeout of a request and its answer, in seconds.
ASK_S = 10.0
# The most processes per address: one listens, the others finish their answers.
MAX_HEIRS = 64


class ListeningSocket(socket.socket):
    """asyncio uses one number both for the length of the queue and for the connections that it accepts in one turn.
    This class sets the first."""

    def listen(self, backlog: int = MAX_WAITING, /) -> None:
        super().listen(MAX_WAITING)


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to this address but not listening. Raises OSError, which names the address."""
    sock = ListeningSocket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit this. asyncio sets it only on listeners that it creates. Without it, a token
        # waits for the client's acknowledgement of the previous one, which arrives after 40 ms.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from None
    return sock


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at this address. Raises OSError, which names the address."""
    sock = bind(host, port)
    try:
        sock.listen()
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from None
    return sock


def ask_for_listener(path: str, timeout_s: float = ASK_S) -> socket.socket:
    """Returns the socket that the launcher, or another gateway, passes through this Unix socket. Raises OSError if none
    does."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(timeout_s)
        asking.connect(path)
        if not _is_ours(asking):
            raise PermissionError(errno.EACCES, f"{path}: is another user's")
        asking.sendall(ASK_LISTENER)
        _, descriptors, _, _ = socket.recv_fds(asking, 1, 1)
    if not descriptors:
        raise ConnectionError(f"{path}: no socket to listen at was given")
    os.set_inheritable(descriptors[0], False)
    return ListeningSocket(fileno=descriptors[0])


def give(listener: socket.socket, to: socket.socket) -> None:
    """Passes the listener to the other process, unless it is closed."""
    if listener.fileno() != -1:
        socket.send_fds(to, [b"\n"], [listener.fileno()])


@contextlib.contextmanager
def inherited(host: str, port: int) -> Iterator[socket.socket]:
    """Yields the socket of the process of this user that has got it for this address through this function; or a new
    one, which does not listen yet, if there is none. The next process gets it in the same way. Raises OSError, which
    names the address, if another program listens there."""
    # Names in the abstract namespace. It belongs to the network namespace, in which a port exists once, and has no
    # files.
    names = [f"\0alignedserve:{host}:{port}:{number}" for number in range(MAX_HEIRS)]
    with _ask_one(names) or bind(host, port) as sock, socket.socket(socket.AF_UNIX) as heirs:
        _bind_one(heirs, names)
        heirs.listen()
        giving = threading.Thread(target=_give_all, args=(sock, heirs), daemon=True)
        giving.start()
        try:
            yield sock
        finally:
            # The thread waits in accept().
            heirs.shutdown(socket.SHUT_RDWR)
            giving.join()


def _ask_one(names: Sequence[str]) -> socket.socket | None:
    for name in names:
        # No process listens there, or one that has stopped accepting connections.
        with contextlib.suppress(OSError):
            return ask_for_listener(name)
    return None


def _bind_one(sock: socket.socket, names: Sequence[str]) -> None:
    """Raises OSError if all names are taken."""
    for name in names:
        with contextlib.suppress(OSError):
            return sock.bind(name)
    raise OSError(errno.EADDRINUSE, f"{names[-1][1:]}: {os.strerror(errno.EADDRINUSE)}")


def _give_all(listener: socket.socket, heirs: socket.socket) -> None:
    while True:
        try:
            asking, _ = heirs.accept()
        except OSError:
            # The socket was shut down.
            return
        with asking, contextlib.suppress(OSError):
            # The peer may be gone, or send nothing.
            asking.settimeout(ASK_S)
            if _is_ours(asking) and asking.recv(len(ASK_LISTENER)) == ASK_LISTENER:
                give(listener, asking)


def _is_ours(peer: socket.socket) -> bool:
    """Whether the peer is a process of this user."""
    _, uid, _ = struct.unpack(
        "3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return bool(uid == os.geteuid())
