"""Places for file content outside the store: a directory or a bucket."""

from __future__ import annotations

from alignedserve.store.homes.base import BrokenOff, Home, Listed, Writer
from alignedserve.store.homes.places import BucketPlace, DirectoryPlace, parse_place
from alignedserve.store.homes.watched import WatchedHome

__all__ = [
    "BrokenOff",
    "BucketPlace",
    "DirectoryPlace",
    "Home",
    "Listed",
    "WatchedHome",
    "Writer",
    "make_home",
    "parse_place",
]


def make_home(place: str) -> Home:
    """Returns the home at this place, a directory or s3://BUCKET/PREFIX. Raises ValueError."""
    found = parse_place(place)
    if isinstance(found, BucketPlace):
        from alignedserve.store.homes.bucket import Bucket

        return Bucket(found)
    from alignedserve.store.homes.directory import Directory

    return Directory(found.path)
