"""The socket at which a gateway takes connections. The launcher has it too, and hands it to each gateway that it
starts: so clients that connect while a gateway is started again wait for it, and a new gateway can take the place of
one that still answers what it has."""

from __future__ import annotations

import os
import socket

# The most connections that wait in the kernel.
MAX_WAITING = 2048
# How a gateway asks the launcher for the socket.
ASK_LISTENER = b"listener\n"


class Listener(socket.socket):
    """asyncio takes one number for how many connections may wait, and for how many it accepts in one turn."""

    def listen(self, backlog: int = MAX_WAITING, /) -> None:
        super().listen(MAX_WAITING)


def bind(host: str, port: int, is_shared: bool = False) -> socket.socket:
    """Returns a socket of this address that does not listen yet. With `is_shared`, other processes of this user may
    listen there as well. Raises OSError, which names the address."""
    sock = Listener(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
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


def listen(host: str, port: int, is_shared: bool = False) -> socket.socket:
    """Like `bind`, and it listens. Raises OSError, which names the address, when it is impossible to listen there."""
    sock = bind(host, port, is_shared)
    try:
        sock.listen()
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from None
    return sock


def ask_for_listener(path: str, timeout_s: float = 10.0) -> socket.socket:
    """Returns the socket that the launcher has, by way of its Unix socket. Raises OSError when it gives none."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(timeout_s)
        asking.connect(path)
        asking.sendall(ASK_LISTENER)
        _, descriptors, _, _ = socket.recv_fds(asking, 1, 1)
    if not descriptors:
        raise ConnectionError(f"{path}: the launcher gave no socket to listen at")
    os.set_inheritable(descriptors[0], False)
    return Listener(fileno=descriptors[0])
