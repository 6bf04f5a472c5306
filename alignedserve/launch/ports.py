"""Finds ports for routers, and checks whether the port for HTTP is free."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from alignedserve.process.listening import bind

# These ports are below those that kernels choose for outgoing connections, so that no other process gets a router's
# port by chance while the router restarts.
FIRST, LAST = 20_000, 32_000


def free_port(host: str) -> int:
    """Returns a port on which no process listens. Raises OSError when `host` is no address of this machine."""
    while True:
        port = random.SystemRandom().randint(FIRST, LAST)
        if is_free(host, port):
            return port


def is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(1)
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


def check_address(host: str, port: int) -> None:
    """Raises ValueError if nothing can listen there."""
    try:
        free = is_free(host, port)
    except OSError as error:
        raise ValueError(f"host={host!r}, port={port}: {error.strerror}") from None
    if not free:
        raise _taken(host, port)


def bound(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to this address but not listening. Raises ValueError if that is not possible: much
    may have changed since the check."""
    try:
        return bind(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _taken(host, port) from None
        raise ValueError(f"port={port}: {error.strerror}") from None


def _taken(host: str, port: int) -> ValueError:
    return ValueError(f"port={port}: another program listens on it at {host}")


@contextmanager
def claimed(host: str, port: int) -> Iterator[None]:
    """Keeps this user's other systems from this address, which has no listener while this one starts. Raises ValueError
    if another one has it."""
    # A name in the abstract namespace. It goes with the processes that hold it, and belongs to the network namespace,
    # in which a port exists once. It is a hash, because host names can be longer than such a name.
    name = hashlib.sha256(f"{os.geteuid()}:{host}:{port}".encode()).hexdigest()
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(f"\0alignedserve-serve:{name}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ValueError(f"port={port}: another server is starting or stopping on it at {host}") from None
        yield
