"""API keys. Only their hashes are stored, and they are compared in constant time. What a request creates belongs to its
key, or to the key's group."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The launcher reads keys too, and has no use for a web framework.
    from fastapi import Request

_KEY, _GROUP_OF = "key:", "group:"
# The digits of a key's digest that name it in logs.
_NAME_DIGITS = 8
# The owner of all requests if no keys are needed.
ANYONE = ""
# Why no key is accepted while the list may be out of date.
EXPIRED = "the API keys may have changed: the launcher, which reads their file, can't be reached"

# The name of a group, which is part of names in the store.
_GROUP = re.compile(r"[!-~]{1,64}")


class Keys:
    def __init__(self, owners: Mapping[bytes, str] | None = None, are_current: bool = True) -> None:
        """`owners` come from owners_of. Empty: all requests are allowed. Unless they `are_current`, the launcher may
        have read others since this process was planned."""
        self._owners = dict(owners or {})
        # Whether keys may have been revoked that are still in this list.
        self.are_expired = False
        self._current = asyncio.Event()
        if are_current:
            self._current.set()
        self._on_change: Callable[[int], None] = lambda num_owners: None

    def change(self, owners: Mapping[bytes, str]) -> None:
        """Accepts these keys instead, from the next request on. Raises ValueError for a list without any."""
        if not owners:
            raise ValueError("without keys the server would be open to everyone")
        self._owners = dict(owners)
        self.are_expired = False
        self._on_change(self.num_owners)
        self._current.set()

    async def until_current(self, linked: asyncio.Task[None]) -> None:
        """Returns when the keys are current, or `linked`, the connection that brings them, has ended."""
        waiting = asyncio.create_task(self._current.wait())
        await asyncio.wait({waiting, linked}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    def watch(self, on_change: Callable[[int], None]) -> None:
        """Calls `on_change` with the number of owners, now and after each change."""
        self._on_change = on_change
        on_change(self.num_owners)

    @property
    def num_owners(self) -> int:
        return len(set(self._owners.values()))

    def expire(self) -> None:
        """Accepts no key until the next list, because this one may be out of date."""
        self.are_expired = True

    def owner(self, authorization: str | None) -> str | None:
        """Returns the owner of the key in an Authorization header. None: the key is unknown, or all have expired."""
        if not self._owners:
            return ANYONE
        if self.are_expired:
            return None
        scheme, _, key = (authorization or "").partition(" ")
        given = digest_of(key.strip())
        # All keys are compared, regardless of matches, so that the time reveals nothing.
        fits = [owner for digest, owner in self._owners.items() if hmac.compare_digest(given, digest)]
        return fits[0] if fits and scheme.lower() == "bearer" else None


def owner_of(http: Request) -> str:
    """Returns the owner of what a request creates, which AuthLimitsMiddleware has found by its key."""
    owner: str = http.state.owner
    return owner


def name_of(owner: str) -> str:
    """Returns the name of an owner in logs: its group, or the first digits of the SHA-256 of its key."""
    return owner if owner.startswith(_GROUP_OF) else owner[: len(_KEY) + _NAME_DIGITS]


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def owners_of(keys: Iterable[str], file: str | None) -> dict[bytes, str]:
    """Returns the owners by digest of their keys, of `keys` and of the keys in `file`. Raises ValueError."""
    return owners_in(keys, file, b"" if file is None else contents_of(file))


def owners_in(keys: Iterable[str], file: str | None, contents: bytes) -> dict[bytes, str]:
    """Returns the same, for a file with these contents. It has one key per line, followed by the name of its group, if
    any. Empty lines and lines that begin with # are skipped. Raises ValueError."""
    found: dict[bytes, str] = {}
    given = [("api_key", key, None) for key in keys]
    for place, key, group in [*given, *(_lines(file, contents) if file is not None else [])]:
        if not key or any(not "!" <= letter <= "~" for letter in key):
            raise ValueError(f"{place}: a key must be of printable ASCII letters, without spaces")
        if group is not None and not _GROUP.fullmatch(group):
            raise ValueError(
                f"{place}: after a key there may be the name of its group: 1 to 64 ASCII letters"
            )
        digest = digest_of(key)
        owner = f"{_KEY}{digest.hex()[:16]}" if group is None else f"{_GROUP_OF}{group}"
        if found.setdefault(digest, owner) != owner:
            raise ValueError(f"{place}: a key is in two groups, or both in a group and in none")
    return found


def contents_of(file: str) -> bytes:
    """Returns what the file of keys contains. Raises ValueError if it can't be read, or is a pipe, a directory or a
    device: a pipe blocks, and yields its keys once."""
    try:
        # Without O_NONBLOCK, opening a pipe blocks.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError(f"api_key_file={file!r}: is not a regular file")
            with open(descriptor, "rb", closefd=False) as opened:
                return opened.read()
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ValueError(f"api_key_file={file!r}: can't be read: {error}") from error


def _lines(file: str, contents: bytes) -> list[tuple[str, str, str | None]]:
    """Returns where each key stands, the key and its group. Raises ValueError."""
    try:
        lines = [line.strip() for line in contents.decode().splitlines()]
    except UnicodeDecodeError as error:
        raise ValueError(f"api_key_file={file!r}: can't be read: {error}") from error
    words = {
        number: line.split(None, 1)
        for number, line in enumerate(lines, 1)
        if line and not line.startswith("#")
    }
    if not words:
        # Otherwise the server would be open to all clients by mistake.
        raise ValueError(f"api_key_file={file!r}: holds no key")
    return [
        (f"api_key_file={file!r}, line {number}", key, group[0] if group else None)
        for number, (key, *group) in words.items()
    ]
