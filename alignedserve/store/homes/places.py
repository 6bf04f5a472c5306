"""Parses names of places: directories and files, s3://BUCKET/KEY. Looks only at the text."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

# The names that S3 allows, and those of similar servers.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
# S3's limit.
_MAX_KEY_BYTES = 1024
_MAX_PATH_BYTES = 4096


@dataclass(frozen=True)
class DirectoryPlace:
    path: Path


@dataclass(frozen=True)
class BucketPlace:
    bucket: str
    # The key or key prefix, without slashes at either end; it may be empty.
    key: str

    def has(self, other: BucketPlace) -> bool:
        """Returns whether the other place is inside this one."""
        return self.bucket == other.bucket and (
            not self.key or other.key == self.key or other.key.startswith(f"{self.key}/")
        )


Place = DirectoryPlace | BucketPlace


def parse_place(text: str) -> Place:
    """Parses s3://BUCKET/KEY, file:///PATH or a local path. Raises ValueError with the reason, to which the caller adds
    a name."""
    scheme, mark, rest = text.partition("://")
    if not mark:
        return DirectoryPlace(Path(os.path.abspath(os.path.expanduser(_sound(text, _MAX_PATH_BYTES)))))
    match scheme:
        case "s3":
            return _bucket_place(rest)
        case "file":
            return DirectoryPlace(_path(rest))
        case _:
            raise ValueError("must begin with s3:// or file:///")


def _bucket_place(rest: str) -> BucketPlace:
    """Keys are taken literally, as in other tools. But a key is refused if decoding it, as a proxy might, would lead
    out of a prefix."""
    bucket, _, key = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise ValueError("must be s3://BUCKET/KEY, with a bucket's name")
    key = _sound(key, _MAX_KEY_BYTES).removesuffix("/")
    decoded, before = key, ""
    while decoded != before:
        decoded, before = unquote(decoded), decoded
    for each in (key, decoded.replace("\\", "/")):
        if key and any(word in ("", ".", "..") for word in each.split("/")):
            raise ValueError("must be s3://BUCKET/KEY, with no '.', '..' or nothing between two slashes")
    return BucketPlace(bucket, key)


def _path(rest: str) -> Path:
    """The path in a file URL is percent-encoded."""
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise ValueError("must be file:///PATH, on this machine")
    if "?" in path or "#" in path:
        raise ValueError("must be file:///PATH; ? and # in it are %3F and %23")
    return Path("/" + _sound(unquote(path, errors="surrogateescape"), _MAX_PATH_BYTES))


def _sound(text: str, max_bytes: int) -> str:
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise ValueError("must have no control characters")
    if len(text.encode("utf-8", "surrogatepass")) > max_bytes:
        raise ValueError(f"must have at most {max_bytes} bytes")
    return text
