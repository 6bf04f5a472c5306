"""Where files and batch jobs are kept: the Redis that was named, or a private one, and the place of `--files-at`."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from alignedserve.cli.doctor.case import Case
from alignedserve.cli.doctor.finding import Finding, fail, note, ok, warn
from alignedserve.launch.store import end_process, locate_store, until_answering
from alignedserve.store import StoreAway
from alignedserve.store.homes import WatchedHome, make_home
from alignedserve.store.records import new_file_id
from alignedserve.store.redis_store import RedisStore
from alignedserve.store.server import PrivateServer, find_server

_START_S = 5.0


def check_store(case: Case) -> Iterator[Finding]:
    with locate_store(case.settings.launch, f"alignedserve-doctor-{os.getpid()}") as location:
        if location.server is None:
            yield from asyncio.run(_named(location.url))
            return
        directory = location.server.socket.parent
        yield ok(f"the state directory is free, and can be written: {directory}")
        yield from _lost_with(directory, case.settings.launch.address is not None)


def check_private_redis(case: Case) -> Iterator[Finding]:
    """Starts Redis on an empty directory, so that the real one is not touched."""
    if case.settings.launch.redis_url is not None:
        return
    with (
        tempfile.TemporaryDirectory(prefix=f"doctor-{os.getpid()}-", dir="/tmp") as name,
        open(Path(name) / "lock", "w") as lock,
    ):
        yield asyncio.run(_starts(PrivateServer(find_server(), Path(name), lock.fileno())))


def check_files_at(case: Case) -> Iterator[Finding]:
    if case.settings.launch.files_at is not None:
        home = WatchedHome(make_home(case.settings.launch.files_at))
        yield asyncio.run(_written(home))


async def _written(home: WatchedHome) -> Finding:
    try:
        await home.probe(new_file_id())
    except StoreAway as error:
        return fail(
            f"files_at: a file can't be written there: {error}",
            "the address, the credentials and rights, or another --files-at",
        )
    return ok("files_at: a file can be written there, and deleted")


async def _named(url: str) -> list[Finding]:
    store = RedisStore(url)
    try:
        info = await store.info()
    except StoreAway as error:
        return [
            fail(
                f"redis_url: does not answer, Files and Batches would not: {error}",
                "start it, see to address, password and certificate, or leave --redis-url",
            )
        ]
    finally:
        await store.close()
    return [ok("redis_url: answers"), *lost_by(info)]


def lost_by(info: Mapping[str, Any]) -> Iterator[Finding]:
    """Says what a Redis would lose, by its INFO."""
    if info.get("cluster_enabled"):
        yield fail(
            "redis_url: is a Redis Cluster, and keys of files and jobs can't be spread over one",
            "a single Redis, with sentinels if it has to survive its machine",
        )
    if not info.get("aof_enabled"):
        yield warn(
            "redis_url: has no append-only file: what was uploaded and answered since its last snapshot is lost when "
            "it ends",
            "appendonly yes, and appendfsync always if no answer may be lost",
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if info.get("maxmemory") and policy != "noeviction":
        yield warn(
            f"redis_url: forgets keys when its memory is full ({policy}): files and jobs would be gone",
            "maxmemory-policy noeviction",
        )


def _lost_with(directory: Path, is_cluster: bool) -> Iterator[Finding]:
    """Says with what the files and jobs of a private Redis would go."""
    kind = file_system_of(directory, Path("/proc/self/mounts").read_text())
    remedy = "--state-dir on a volume that outlives it, or --redis-url"
    if kind in ("tmpfs", "ramfs"):
        yield warn("the state directory is in memory: files and jobs are lost when this machine ends", remedy)
    elif kind == "overlay":
        yield warn("the state directory is the container's own: files and jobs are lost with it", remedy)
    elif is_cluster:
        yield note("files and jobs are on this machine's disk alone, and lost with that", remedy)


def file_system_of(path: Path, mounts: str) -> str:
    """Returns the kind of the file system that a path is on, by /proc/self/mounts."""
    found, kind = "", ""
    for line in mounts.splitlines():
        _, where, what, *_ = line.split()
        # Blanks are written as octal numbers.
        where = where.encode().decode("unicode_escape")
        if path.is_relative_to(where) and len(where) >= len(found):
            found, kind = where, what
    return kind


async def _starts(server: PrivateServer) -> Finding:
    process = await server.start()
    ended = asyncio.create_task(process.wait())
    answering = asyncio.create_task(until_answering(server.url))
    try:
        await asyncio.wait({ended, answering}, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return ok(f"{Path(server.program).name} starts")
        return fail(
            f"{server.program} does not start: {server.last_words(process.pid)}",
            "another Redis, by --redis-url",
        )
    finally:
        answering.cancel()
        await end_process(process, ended)
