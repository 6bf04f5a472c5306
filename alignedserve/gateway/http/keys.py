"""API keys. Only their digests are stored, and looked up: how long that takes depends on no key. What a request creates
belongs to its key, or to the key's group. An operator's key may also read the counts of all clients, and change the
server for all (access.py)."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import stat
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The launcher reads keys too, and has no use for a web framework.
    from fastapi import Request
    from starlette.datastructures import Headers

_KEY, _GROUP_OF, _OPERATOR = "key:", "group:", "operator:"
# The digits of a key's digest that name it in logs.
_NAME_DIGITS = 8
# The options that name files of keys.
API_KEY_FILE, OPERATOR_KEY_FILE = "api_key_file", "operator_key_file"
# The owner of all requests if no keys are needed.
ANYONE = ""
# Why no key is accepted while the list may be out of date.
EXPIRED = "the API keys may have changed: the launcher, which reads their file, can't be reached"

# Unicode's categories of control characters, and of separators of lines and paragraphs.
_CONTROLS = ("Cc", "Zl", "Zp")
# The name of a group, which is part of names in the store.
_GROUP = re.compile(r"[!-~]{1,64}")


class Keys:
    def __init__(self, owners: Mapping[bytes, str] | None = None, are_current: bool = True) -> None:
        """`owners` come from owners_of. Empty: all requests are allowed. Unless they `are_current`, the launcher may
        have read others since this process was planned."""
        self._owners: Mapping[bytes, str] = dict(owners or {})
        # The owners in all lists so far: the counts of all clients include those of revoked keys.
        self._counted = {*self._owners.values()}
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
        self._counted.update(owners.values())
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
    def are_needed(self) -> bool:
        return bool(self._owners)

    @property
    def num_owners(self) -> int:
        """The number of owners, without operators."""
        return len({owner for owner in self._owners.values() if not is_operator(owner)})

    def may_read_counters(self, owner: str) -> bool:
        """Returns whether `owner` may read the counts of all clients. An API key may if no list so far had another
        owner or an operator's key: then it is the only one counted."""
        return is_operator(owner) or len(self._counted) <= 1

    def expire(self) -> None:
        """Accepts no key until the next list, because this one may be out of date."""
        self.are_expired = True

    def owner(self, authorization: str | None) -> str | None:
        """Returns the owner of the key in an Authorization header. None: the key is unknown, or all have expired."""
        if not self._owners:
            return ANYONE
        if self.are_expired:
            return None
        scheme, key = _parts(authorization or "")
        return self._owners.get(digest_of(key)) if scheme == "bearer" else None


def authorizations_of(headers: Headers) -> list[str | None]:
    """Returns the key as an Authorization header, or None. Anthropic's clients send it in a header of its own. Several
    are returned if they differ: a proxy in front may have checked another one than this server would. An empty key is
    none."""
    keys = [f"Bearer {key}" for key in headers.getlist("x-api-key")]
    parts = map(_parts, [*headers.getlist("authorization"), *keys])
    found = [f"{scheme} {key}" for scheme, key in parts if key or scheme not in ("", "bearer")]
    return list(dict.fromkeys(found)) or [None]


def _parts(authorization: str) -> tuple[str, str]:
    """Returns the scheme and the key of an Authorization header, each in one spelling."""
    scheme, _, key = authorization.strip().partition(" ")
    return scheme.lower(), key.strip()


def owner_of(http: Request) -> str:
    """Returns the owner of what a request creates, which AuthLimitsMiddleware has found by its key."""
    owner: str = http.state.owner
    return owner


def is_operator(owner: str) -> bool:
    return owner.startswith(_OPERATOR)


def name_of(owner: str) -> str:
    """Returns the name of an owner in logs: its group, or the first digits of the SHA-256 of its key."""
    return owner if _GROUP_OF in owner else owner[: owner.rfind(":") + 1 + _NAME_DIGITS]


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def owners_of(
    keys: Iterable[str],
    file: str | None,
    operator_keys: Iterable[str] = (),
    operator_file: str | None = None,
) -> dict[bytes, str]:
    """Returns the owners by digest of their keys: API keys, and operators' keys. Raises ValueError."""
    files = files_of(file, operator_file)
    return owners_in(keys, operator_keys, files, contents_of(files))


def files_of(file: str | None, operator_file: str | None) -> dict[str, str]:
    """Returns the paths of the files of keys, by the names of their options."""
    given = {API_KEY_FILE: file, OPERATOR_KEY_FILE: operator_file}
    return {option: path for option, path in given.items() if path is not None}


def owners_in(
    keys: Iterable[str], operator_keys: Iterable[str], files: Mapping[str, str], contents: Mapping[str, bytes]
) -> dict[bytes, str]:
    """Returns the same, for files with these contents. A file has one key per line, followed by the name of its group,
    if any. Empty lines and lines that begin with # are skipped. Raises ValueError."""
    found: dict[bytes, str] = {}
    for option, kind, given in (
        (API_KEY_FILE, "", [("api_key", key, None) for key in keys]),
        (OPERATOR_KEY_FILE, _OPERATOR, [("operator_key", key, None) for key in operator_keys]),
    ):
        in_file = _lines(f"{option}={files[option]!r}", contents[option]) if option in files else []
        for place, key, group in [*given, *in_file]:
            digest, owner = _owner(place, key, group)
            if found.setdefault(digest, kind + owner) != kind + owner:
                raise ValueError(
                    f"{place}: a key is in two groups, or both in a group and in none, or both an API key and an "
                    "operator's key"
                )
    return found


def _owner(place: str, key: str, group: str | None) -> tuple[bytes, str]:
    """Returns a key's digest and its owner. Raises ValueError."""
    if not key or any(not "!" <= letter <= "~" for letter in key):
        raise ValueError(f"{place}: a key must be of printable ASCII letters, without spaces")
    if group is not None and not _GROUP.fullmatch(group):
        raise ValueError(f"{place}: after a key there may be the name of its group: 1 to 64 ASCII letters")
    digest = digest_of(key)
    return digest, f"{_KEY}{digest.hex()[:16]}" if group is None else f"{_GROUP_OF}{group}"


def contents_of(files: Mapping[str, str]) -> dict[str, bytes]:
    """Returns what the files of keys contain, by the names of their options. Raises ValueError if one can't be read, or
    is a pipe, a directory or a device: a pipe blocks, and yields its keys once."""
    return {option: _contents(f"{option}={path!r}", path) for option, path in files.items()}


def _contents(place: str, path: str) -> bytes:
    try:
        # Without O_NONBLOCK, opening a pipe blocks.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError(f"{place}: is not a regular file")
            with open(descriptor, "rb", closefd=False) as opened:
                return opened.read()
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ValueError(f"{place}: can't be read: {error}") from error


def _lines(place: str, contents: bytes) -> list[tuple[str, str, str | None]]:
    """Returns where each key of a file stands, the key and its group. Raises ValueError."""
    try:
        text = contents.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: can't be read: {error}") from error
    # `splitlines` would also split at control characters, where a comment could end and a key begin.
    *lines, rest = text.replace("\r\n", "\n").split("\n")
    if rest:
        # A key that is cut short would be a key.
        raise ValueError(f"{place}, line {len(lines) + 1}: has no line end, so the file may be cut short")
    for number, line in enumerate(lines, 1):
        if any(unicodedata.category(letter) in _CONTROLS for letter in line if letter != "\t"):
            raise ValueError(f"{place}, line {number}: contains a control character")
    words = {
        number: line.split(None, 1)
        for number, line in enumerate(map(str.strip, lines), 1)
        if line and not line.startswith("#")
    }
    if not words:
        # Otherwise the server would be open to all clients by mistake.
        raise ValueError(f"{place}: holds no key")
    return [
        (f"{place}, line {number}", key, group[0] if group else None)
        for number, (key, *group) in words.items()
    ]
