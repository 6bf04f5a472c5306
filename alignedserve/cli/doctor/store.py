"""Checks of the store of files and batch jobs: a given or private Redis, and --files-at."""

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
    # No process is started here.
    with locate_store(case.settings.launch, note=lambda pid: None) as location:
        if location.server is None:
            yield from asyncio.run(_named(location.url))
            return
        directory = location.server.socket.parent
        yield ok(f"the state directory is free and writable: {directory}")
        yield from _lost_with(directory, case.settings.launch.address is not None)


def check_private_redis(case: Case) -> Iterator[Finding]:
    """Starts Redis on an empty directory. The real one is not touched."""
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
            f"files_at: a test file can't be written: {error}",
            "check the address, credentials and permissions, or use another --files-at",
        )
    return ok("files_at: a test file was written and deleted")


async def _named(url: str) -> list[Finding]:
    store = RedisStore(url)
    try:
        info = await store.info()
    except StoreAway as error:
        return [
            fail(
                f"redis_url: does not answer, so Files and Batches would not work: {error}",
                "start it, check address, password and certificate, or omit --redis-url",
            )
        ]
    finally:
        await store.close()
    return [ok("redis_url: answers"), *lost_by(info)]


def lost_by(info: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields what a Redis with this INFO would lose."""
    if info.get("cluster_enabled"):
        yield fail(
            "redis_url: is a Redis Cluster, which can't hold files and jobs",
            "use a single Redis, with sentinels for failover",
        )
    if not info.get("aof_enabled"):
        yield warn(
            "redis_url: has no append-only file: when it stops, all uploads and answers since its last snapshot are "
            "lost",
            "set appendonly yes, and appendfsync always to lose no answer at all",
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if info.get("maxmemory") and policy != "noeviction":
        yield warn(
            f"redis_url: evicts keys when its memory is full ({policy}): files and jobs would be lost",
            "set maxmemory-policy noeviction",
        )


def _lost_with(directory: Path, is_cluster: bool) -> Iterator[Finding]:
    """Yields how the files and jobs of a private Redis could be lost."""
    kind = file_system_of(directory, Path("/proc/self/mounts").read_text())
    remedy = "use --state-dir on a persistent volume, or --redis-url"
    if kind in ("tmpfs", "ramfs"):
        yield warn("the state directory is in memory: a reboot loses files and jobs", remedy)
    elif kind == "overlay":
        yield warn("the state directory is inside the container: files and jobs are lost with it", remedy)
    elif is_cluster:
        yield note("files and jobs are only on this machine's disk", remedy)


def file_system_of(path: Path, mounts: str) -> str:
    """Returns the type of the file system of a path, from /proc/self/mounts."""
    found, kind = "", ""
    for line in mounts.splitlines():
        _, where, what, *_ = line.split()
        # Blanks are escaped as octal numbers.
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
            "use another Redis with --redis-url",
        )
    finally:
        answering.cancel()
        await end_process(process, ended)
