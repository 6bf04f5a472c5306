"""Where files and batch jobs are kept: the Redis that was named, or a private one, and the place of `--files-at`."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from alignedserve.cli.doctor.case import Case
from alignedserve.cli.doctor.finding import Finding, fail, ok
from alignedserve.launch.store import end_process, locate_store, until_answering
from alignedserve.store import StoreAway
from alignedserve.store.homes import WatchedHome, make_home
from alignedserve.store.records import new_file_id
from alignedserve.store.redis_store import RedisStore
from alignedserve.store.server import PrivateServer, find_server

_START_S = 5.0


def check_store(case: Case) -> Iterator[Finding]:
    with locate_store(case.settings.launch, f"alignedserve-doctor-{os.getpid()}") as location:
        if location.server is not None:
            yield ok(f"the state directory is free, and can be written: {location.server.socket.parent}")
        else:
            yield asyncio.run(_named(location.url))


def check_private_redis(case: Case) -> Iterator[Finding]:
    """Starts Redis on an empty directory, so that the real one is not touched."""
    if case.settings.launch.redis_url is not None:
        return
    with (
        tempfile.TemporaryDirectory(prefix="doctor-", dir="/tmp") as name,
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


async def _named(url: str) -> Finding:
    store = RedisStore(url)
    try:
        await store.ping()
    except StoreAway as error:
        return fail(
            f"redis_url: does not answer, Files and Batches would not: {error}",
            "start it, or leave --redis-url",
        )
    finally:
        await store.close()
    return ok("redis_url: answers")


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
