"""Which URLs a webhook may have. The addresses behind them are checked on connecting (network.py)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import SplitResult, unquote, urlsplit

MAX_URL_CHARS = 2048
_ESCAPE = re.compile("%[0-9A-Fa-f]{2}")


def check_url(url: str) -> SplitResult:
    """Returns the parts of the URL. Raises ValueError if it is no plain HTTP URL."""
    if not 0 < len(url) <= MAX_URL_CHARS or any(not "!" <= letter <= "~" for letter in url) or "\\" in url:
        raise ValueError(f"must be a URL of at most {MAX_URL_CHARS} ASCII letters")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must begin with https:// or http:// and a host")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise ValueError("must have no user and no fragment")
    # This raises ValueError for an invalid port.
    parts.port  # noqa: B018
    # A receiver may resolve such a path to another one. Some drop what follows a semicolon, and some decode twice.
    plain = unquote(parts.path)
    names = {segment.partition(";")[0] for segment in plain.split("/")}
    if plain.count("/") != parts.path.count("/") or "\\" in plain or {".", ".."} & names:
        raise ValueError("must have a path without . and .. and without escaped slashes")
    if _ESCAPE.search(plain):
        raise ValueError("must have a path that is percent-encoded once")
    return parts


def is_allowed(url: str, prefixes: Iterable[str]) -> bool:
    """Returns whether one of the prefixes has the same scheme, host and port, and a path that is the URL's or a parent
    of it. Raises ValueError if `url` is no URL."""
    asked = check_url(url)
    return any(_begins(asked, check_url(prefix)) for prefix in prefixes)


def _begins(asked: SplitResult, allowed: SplitResult) -> bool:
    if _origin(asked) != _origin(allowed):
        return False
    path = allowed.path.rstrip("/")
    return asked.path == path or asked.path.startswith(f"{path}/")


def _origin(parts: SplitResult) -> tuple[str, str, int]:
    assert parts.hostname
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme]
