"""TLS, passwords and sentinels, in front of real servers."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trustme
from redis.asyncio import Redis

from alignedserve.launch.ports import free_port
from alignedserve.store import FileRecord, StoreAway
from alignedserve.store.records import new_file_id
from alignedserve.store.redis_pool import RedisPool, _taken_apart
from alignedserve.store.redis_store import RedisStore
from alignedserve.store.server import find_server
from tests.gateway.served import served
from tests.playing import play
from tests.store.redis_process import redis_running

HOST = "127.0.0.1"
# less than a scenario may take (tests/playing.py)
LIMIT_S = 90.0
SERVICE = "jobs"


async def stored(store: RedisStore) -> FileRecord:
    file = FileRecord(new_file_id(), "in.jsonl", "batch", 3, 1, 100)
    await store.put_chunk(file.id, "", 0, b"abc")
    await store.commit_file(file)
    return file


# ---- TLS -------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def tls_before(socket: Path, authority: trustme.CA) -> AsyncIterator[int]:
    """TLS in front of a server that has none; yields its port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(HOST).configure_cert(context)

    async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ssl.SSLError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_unix_connection(socket)
        await asyncio.gather(passed_on(reader, to_server), passed_on(from_server, writer))

    async with await asyncio.start_server(served, HOST, 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


def test_tls_and_a_password(tmp_path: Path) -> None:
    authority = trustme.CA()
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)

    async def refused(url: str, why: str) -> None:
        store = RedisStore(url)
        with pytest.raises(StoreAway, match=why):
            await store.ping()
        await store.close()

    async def scenario() -> None:
        async with redis_running() as redis, tls_before(redis.server.socket, authority) as port:
            async with Redis.from_url(redis.url) as own:
                await own.config_set("requirepass", "s&cret/")
                own.connection_pool.connection_kwargs["password"] = "s&cret/"
                store = RedisStore(f"rediss://:s%26cret%2F@{HOST}:{port}/3?ssl_ca_certs={ca}")
                file = await stored(store)
                assert await store.file(file.id) == file
                await store.close()
                assert [*await own.info("keyspace")] == ["db3"]
            await refused(f"rediss://:s%26cret%2F@{HOST}:{port}", "certificate verify failed")
            await refused(f"rediss://:wrong@{HOST}:{port}?ssl_ca_certs={ca}", "invalid username-password")
            await refused(
                f"rediss://{HOST}:{port}?ssl_ca_certs={ca}",
                "HELLO must be called with the client already authenticated",
            )

    play(scenario)


# ---- sentinels -------------------------------------------------------------------------------------------------------


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([find_server(), *arguments], stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def server(directory: Path, port: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    directory.mkdir()
    with running(
        *("--bind", HOST, "--port", str(port), "--dir", str(directory), "--save", ""),
        *("--requirepass", "of-servers", "--masterauth", "of-servers"),
        *options,
    ) as process:
        yield process


@contextmanager
def sentinel(directory: Path, port: int, master: int) -> Iterator[subprocess.Popen[bytes]]:
    directory.mkdir()
    file = directory / "sentinel.conf"
    file.write_text(
        f"bind {HOST}\nport {port}\ndir {directory}\nrequirepass of-sentinels\n"
        f"sentinel monitor {SERVICE} {HOST} {master} 1\n"
        f"sentinel auth-pass {SERVICE} of-servers\n"
        f"sentinel down-after-milliseconds {SERVICE} 600000\n"
        f"sentinel failover-timeout {SERVICE} 5000\n"
    )
    with running(str(file), "--sentinel") as process:
        yield process


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    give_up_s = time.monotonic() + LIMIT_S
    while time.monotonic() < give_up_s:
        with contextlib.suppress(StoreAway, OSError):
            if await condition():
                return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not become so")


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
def test_when_the_master_dies_the_store_goes_on_at_the_one_that_sentinels_choose() -> None:
    ports = [free_port(HOST) for _ in range(3)]
    nobody = free_port(HOST)

    async def scenario(directory: Path) -> None:
        with (
            server(directory / "first", ports[0]) as first,
            server(directory / "second", ports[1], "--replicaof", HOST, str(ports[0])),
            sentinel(directory / "sentinel", ports[2], ports[0]),
        ):
            store = RedisStore(
                f"redis+sentinel://:of-servers@{HOST}:{nobody},{HOST}:{ports[2]}/{SERVICE}/2"
                "?sentinel_password=of-sentinels"
            )

            async def is_copied() -> bool:
                info = await store.info()
                return bool(info["connected_slaves"] == 1 and info["slave0"]["state"] == "online")

            async def is_known() -> bool:
                async with Redis(host=HOST, port=ports[2], password="of-sentinels") as asked:
                    return len(await asked.sentinel_slaves(SERVICE)) == 1

            await until(is_copied)
            await until(is_known)
            before = await stored(store)

            async def is_there_too() -> bool:
                return bool(await store.call(store._redis.wait(1, 100)) == 1)

            await until(is_there_too)
            first.kill()
            with pytest.raises(StoreAway):
                await stored(store)
            # Only now, so that no pause of the master looks like its death.
            async with Redis(host=HOST, port=ports[2], password="of-sentinels") as asked:
                await asked.sentinel_set(SERVICE, "down-after-milliseconds", 1000)

            async def is_stored() -> bool:
                await stored(store)
                return True

            await until(is_stored)
            assert (await store.info())["tcp_port"] == ports[1]
            assert await store.file(before.id) == before
            await store.close()

    with tempfile.TemporaryDirectory(prefix="sentinel-", dir="/tmp") as name:
        play(lambda: scenario(Path(name)))


@pytest.mark.parametrize(
    "rest, found",
    [
        ("a:1,b/main", ([("a", 1), ("b", 26379)], "main", "redis://sentinel/?", {})),
        (
            "me:p%40@[::1]:5/main/7?sentinel_password=x&db=2",
            ([("::1", 5)], "main", "redis://me:p%40@sentinel/7?db=2", {"password": "x"}),
        ),
    ],
)
def test_an_address_of_sentinels(rest: str, found: Sequence[object]) -> None:
    assert _taken_apart("redis", rest) == found


@pytest.mark.parametrize(
    "url, why",
    [
        ("redis+sentinel://a:1", "name of the service is missing"),
        ("redis+sentinel://a:1,/main", "is not HOST:PORT"),
        ("redis+sentinel://a:one/main", "Port could not be cast"),
        ("redis+tls://a", "must specify one of"),
        ("redis+sentinel://a/main?socket_timeout=soon", "Invalid value for 'socket_timeout'"),
    ],
)
def test_an_address_that_is_none(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RedisStore(url)


# ---- a server that is not there --------------------------------------------------------------------------------------


def test_the_log_has_the_address_and_the_reason_and_no_password(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port(HOST)

    async def scenario() -> None:
        async with served(store_url=f"redis://user:hidden@{HOST}:{port}/1") as at:
            while not caplog.records:
                await asyncio.sleep(0.01)
            health = (await at.http.get("/health")).json()
            assert health["store"] == "down" and str(port) not in str(health)

    caplog.set_level("WARNING", "alignedserve.batch")
    play(scenario)
    line = caplog.messages[0]
    assert line.startswith(f"the store is down: batch jobs wait for it ({HOST}:{port}: ")
    assert "Error 111" in line and "hidden" not in line and "user" not in line


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://u:hidden@a.example/3", "a.example:6379"),
        ("rediss://:hidden@[::1]:7/3", "::1:7"),
        ("unix:///run/x.sock?password=hidden", "/run/x.sock"),
        ("redis+sentinel://u:hidden@a:1,b/jobs/2?sentinel_password=hidden", "a:1,b:26379/jobs"),
    ],
)
def test_an_address_is_told_without_user_and_password(url: str, place: str) -> None:
    assert RedisPool(url).place == place
