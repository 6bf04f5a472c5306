"""Where a router listens: a port of a host, or, for its own host's processes only, a Unix socket.

A socket is in a directory that is the user's alone, so that nobody else can connect, or listen there while the router
is away.
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RouterAddress:
    host: str
    port: int
    # the cluster's token, which proves that a process belongs to it
    token: str = field(repr=False)
    # the path of the Unix socket; there is no host and no port then
    path: str | None = None

    @classmethod
    def unix(cls, path: str, token: str) -> RouterAddress:
        return cls("", 0, token, path)

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


def check_unused(path: str) -> None:
    """Raises OSError where somebody listens. A socket that was left behind is none that is used."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        try:
            sock.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except BlockingIOError:
            # so many processes wait for the listener already
            pass
    raise OSError(errno.EADDRINUSE, f"{path}: {os.strerror(errno.EADDRINUSE)}")
