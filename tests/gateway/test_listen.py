from __future__ import annotations

import socket

from alignedserve.process.listening import listen


def test_what_is_written_leaves_at_once() -> None:
    """Nagle's algorithm would keep a token back until the client has acknowledged the one before."""
    with listen("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname()):
        connection, _ = sock.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
