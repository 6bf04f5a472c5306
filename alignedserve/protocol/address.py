"""The address at which a router listens: a host and port or, for processes on its own host only, a Unix socket.

The socket lies in a directory that only this user can access. So no other user can connect to it, or listen there while
the router is away.
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
    # The cluster's token. A process that has it belongs to the cluster.
    token: str = field(repr=False)
    # The path of the Unix socket; host and port are then unused.
    path: str | None = None

    @classmethod
    def unix(cls, path: str, token: str) -> RouterAddress:
        return cls("", 0, token, path)

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


def check_unused(path: str) -> None:
    """Raises OSError if a process listens on the socket. A socket file that a dead process has left behind is
    unused."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        try:
            sock.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except BlockingIOError:
            # The listener's backlog is full, so a process is listening.
            pass
    raise OSError(errno.EADDRINUSE, f"{path}: {os.strerror(errno.EADDRINUSE)}")
