"""API keys: known here by their hashes only, and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from pathlib import Path

# who asks where no keys are needed
ANYONE = "anyone"


class Keys:
    def __init__(self, digests: Sequence[bytes] = ()) -> None:
        """Without any, everyone may do everything."""
        self._digests = tuple(digests)

    def holder(self, authorization: str | None) -> str | None:
        """Who sent an Authorization header; None: nobody that is known."""
        if not self._digests:
            return ANYONE
        scheme, _, key = (authorization or "").partition(" ")
        given = digest_of(key.strip())
        # all of them, whichever fits: how long it takes says nothing
        fits = [hmac.compare_digest(given, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(fits):
            return None
        return given.hex()[:12]


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def digests_of(keys: Iterable[str], file: str | None) -> tuple[bytes, ...]:
    """Of those given, and those in the file: one a line; empty lines and those that begin with # don't count. Raises
    ValueError."""
    found = list(keys)
    if file is not None:
        found += _read(file)
    for key in found:
        if not key or any(not "!" <= letter <= "~" for letter in key):
            raise ValueError("api_key: a key must be of printable ASCII letters, without spaces")
    return tuple(dict.fromkeys(map(digest_of, found)))


def _read(file: str) -> list[str]:
    try:
        lines = [line.strip() for line in Path(file).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"api_key_file={file!r}: can't be read: {error}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        # or the server would be open to everyone, by mistake
        raise ValueError(f"api_key_file={file!r}: holds no key")
    return keys
