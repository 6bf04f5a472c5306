"""The socket at which a gateway takes connections. The launcher has it too, and hands it to each gateway that it
starts: so clients that connect while a gateway is started again wait for it, and a new gateway can take the place of
one that still answers what it has. On an island's host, where the launcher is not, a gateway hands it to the next."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence

# The most connections that wait in the kernel.
MAX_WAITING = 2048
# How a gateway asks for the socket.
ASK_LISTENER = b"listener\n"
# A question and its answer have so many seconds.
ASK_S = 10.0
# The most processes of one address at a time: one listens, others still answer what they have.
MAX_HEIRS = 64


class Listener(socket.socket):
    """asyncio takes one number for how many connections may wait, and for how many it accepts in one turn."""

    def listen(self, backlog: int = MAX_WAITING, /) -> None:
        super().listen(MAX_WAITING)


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket of this address that does not listen yet. Raises OSError, which names the address."""
    sock = Listener(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it; asyncio sets it only where it made the listener. Without it a token waits for the
        # client's acknowledgement of the one before, which comes after 40 ms.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from None
    return sock


def listen(host: str, port: int) -> socket.socket:
    """Like `bind`, and it listens. Raises OSError, which names the address, when it is impossible to listen there."""
    sock = bind(host, port)
    try:
        sock.listen()
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from None
    return sock


def ask_for_listener(path: str, timeout_s: float = ASK_S) -> socket.socket:
    """Returns the socket that the launcher, or another gateway, gives at this Unix socket. Raises OSError when nobody
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
    return Listener(fileno=descriptors[0])


def give(listener: socket.socket, to: socket.socket) -> None:
    """Gives nothing when the listener is closed."""
    if listener.fileno() != -1:
        socket.send_fds(to, [b"\n"], [listener.fileno()])


@contextlib.contextmanager
def inherited(host: str, port: int) -> Iterator[socket.socket]:
    """Yields the socket of this user's process that has listened there by way of this until now, or a new one if there
    is none; the next process gets it the same way. Raises OSError, which names the address, when it is impossible to
    listen there."""
    # In the abstract namespace, which is the network's and has no files: as long as it is, the host has this port once.
    names = [f"\0alignedserve:{host}:{port}:{number}" for number in range(MAX_HEIRS)]
    with _ask_one(names) or listen(host, port) as sock, socket.socket(socket.AF_UNIX) as heirs:
        _bind_one(heirs, names)
        heirs.listen()
        giving = threading.Thread(target=_give_all, args=(sock, heirs), daemon=True)
        giving.start()
        try:
            yield sock
        finally:
            # It waits there.
            heirs.shutdown(socket.SHUT_RDWR)
            giving.join()


def _ask_one(names: Sequence[str]) -> socket.socket | None:
    for name in names:
        # Nobody is there, or one that takes no connections any more.
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
            # It was shut down.
            return
        with asking, contextlib.suppress(OSError):
            # Who asks may be gone, or ask nothing.
            asking.settimeout(ASK_S)
            if _is_ours(asking) and asking.recv(len(ASK_LISTENER)) == ASK_LISTENER:
                give(listener, asking)


def _is_ours(peer: socket.socket) -> bool:
    """Whether a process of this user is at the other end."""
    _, uid, _ = struct.unpack(
        "3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return bool(uid == os.geteuid())
