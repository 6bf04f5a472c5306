"""Every home of content that there is: what is promised of one is tested of all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from alignedserve.store import Contents, ContentsInStore, StoreLimits
from alignedserve.store.contents import ContentsApart
from alignedserve.store.homes import WatchedHome, make_home
from alignedserve.store.redis_store import RedisStore
from tests.store.redis_process import RedisProcess, redis_store
from tests.store.s3_process import BUCKET, S3Process

HOMES = ("redis", "directory", "bucket")


@dataclass
class Kept:
    """A store, and where its files have their content."""

    redis: RedisProcess
    store: RedisStore
    contents: Contents
    # The directory or the bucket.
    place: str | None
    s3: S3Process | None

    def leftovers(self) -> list[str]:
        """Returns what there is in the directory or the bucket, whole or not."""
        if self.s3:
            return self.s3.keys() + ["part"] * self.s3.unfinished()
        return [each.name for each in Path(self.place).rglob("*") if each.is_file()] if self.place else []


@asynccontextmanager
async def kept_in(
    kind: str, tmp_path: Path, s3: S3Process, limits: StoreLimits | None = None
) -> AsyncIterator[Kept]:
    async with redis_store(limits) as (redis, store):
        if kind == "redis":
            yield Kept(redis, store, ContentsInStore(store), None, None)
        else:
            place = str(tmp_path / "files") if kind == "directory" else f"s3://{BUCKET}/some/where"
            contents = ContentsApart(store, WatchedHome(make_home(place)))
            yield Kept(redis, store, contents, place, s3 if kind == "bucket" else None)
