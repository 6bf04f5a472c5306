"""The launcher's Unix socket for other processes of the same user. Gateways ask it for the socket to listen at, and
`alignedserve restart` asks for a restart.

A question is one line. The answer to a restart is several lines. The last one is DONE, or begins with FAILED.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

from alignedserve.process.listening import ASK_LISTENER, give
from alignedserve.protocol.address import check_unused

ASK_RESTART = b"restart\n"
DONE, FAILED = "done", "failed: "
# seconds within which a question must arrive
ASK_S = 10.0
# the longest path of a Unix socket, with the zero at its end
_MAX_PATH_BYTES = 108

Say = Callable[[str], None]


class RestartFailed(RuntimeError):
    """A process was not replaced. The system keeps the processes that it has."""


def control_path(host: str, port: int) -> str:
    """Returns the path of the socket. Raises ValueError if it would be too long."""
    path = str(_directory() / f"{host.replace('/', '_')}:{port}.sock")
    if len(os.fsencode(path)) >= _MAX_PATH_BYTES:
        raise ValueError(f"host={host!r}: is too long a name; give its address")
    return path


def _directory() -> Path:
    # It does not depend on TMPDIR, which may differ between shells.
    return Path(f"/tmp/alignedserve-{os.geteuid()}")


def prepare_directory() -> Path:
    """Makes the directory for the launchers of this user, and returns it. Raises ValueError if it can't be made or is
    not private."""
    directory = _directory()
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{directory}: {error.strerror}") from None
    check_directory()
    return directory


def check_directory() -> None:
    """Raises ValueError if other users have access to the directory."""
    directory = _directory()
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_own or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"{directory}: must be a directory of this user alone; remove it")


class Control:
    def __init__(self, path: str, listener: socket.socket, restart: Callable[[Say], Awaitable[None]]) -> None:
        """`restart` replaces all processes and reports its progress. It raises RestartFailed."""
        self._path = path
        self._listener = listener
        self._restart = restart
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Raises OSError when another launcher listens there."""
        check_unused(self._path)
        self._server = await asyncio.start_unix_server(self._answer, self._path)
        os.chmod(self._path, 0o600)

    def stop(self) -> None:
        """Ends a restart, and closes the socket for HTTP here. It stays open in gateways that have it."""
        self._listener.close()
        for task in self._answering:
            task.cancel()

    async def close(self) -> None:
        self.stop()
        if self._answering:
            await asyncio.wait(self._answering)
        if self._server:
            self._server.close()
            Path(self._path).unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._answering.add(task)
        try:
            async with asyncio.timeout(ASK_S):
                question = await reader.readline()
            if question == ASK_LISTENER:
                self._give_listener(writer)
            elif question == ASK_RESTART:
                await self._restarted(writer)
        except (OSError, TimeoutError, ValueError, asyncio.CancelledError):
            # The other process has exited or sends too much, or the system stops.
            writer.transport.abort()
        finally:
            self._answering.discard(task)
            writer.close()

    def _give_listener(self, writer: asyncio.StreamWriter) -> None:
        # asyncio's view of a socket can't send descriptors.
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as sock:
            give(self._listener, sock)

    async def _restarted(self, writer: asyncio.StreamWriter) -> None:
        """Continues if the asking process exits, because half of the processes may be new."""

        def say(line: str) -> None:
            writer.write(f"{line}\n".encode())

        try:
            await self._restart(say)
            say(DONE)
        except RestartFailed as error:
            say(f"{FAILED}{error}")
        except asyncio.CancelledError:
            # Only `stop` cancels it. asyncio would print a traceback for a handler that ends with this error.
            say(f"{FAILED}the system is stopping")
