"""Files in a directory or a bucket, with OpenAI's own client; and batches with inputs that are not uploaded."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai.types import Batch

from alignedserve import demo
from alignedserve.engine.config import EngineConfig
from alignedserve.gateway.config import GatewayConfig, HttpConfig
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.process import GatewayProcess
from alignedserve.launch.ports import free_port
from alignedserve.protocol.address import RouterAddress
from alignedserve.store.contents import LEFT_BEHIND_S, ContentsApart
from alignedserve.store.homes import WatchedHome, make_home
from alignedserve.store.redis_store import RedisStore
from alignedserve.types import InstanceId
from tests.full_disk import files_of_at_most
from tests.gateway.batching import CHATS, QUICK, Gateway, System, gateway_on, jsonl, questions
from tests.gateway.scripted import TOKEN, ScriptedRouter
from tests.store.redis_process import redis_running
from tests.store.s3_process import BUCKET, S3Process, s3_running

Scenario = Callable[[System], Awaitable[None]]
HOMES = ("directory", "bucket")
# Larger than a part of a bucket's upload.
LARGE = os.urandom(7_500_000)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Process]:
    with s3_running() as server:
        yield server


@pytest.fixture
def place(request: pytest.FixtureRequest, s3: S3Process, tmp_path: Path) -> str:
    s3.empty()
    return f"s3://{BUCKET}/kept" if request.param == "bucket" else str(tmp_path / "kept")


def play(scenario: Scenario, **settings: Any) -> None:
    async def within_time() -> None:
        router = ScriptedRouter()
        port = await router.hub.listen("127.0.0.1", 0)
        async with (
            asyncio.timeout(240),
            redis_running() as redis,
            gateway_on(port, redis.url, **settings) as gateway,
        ):
            await scenario(System(router, port, redis, gateway))
        router.hub.close()

    asyncio.run(within_time())


async def stored(redis_url: str, name: str = "bytes-apart") -> int:
    store = RedisStore(redis_url)
    try:
        return int(await store._redis.get(f"alignedserve:{name}") or 0)
    finally:
        await store.close()


async def swept(redis_url: str, place: str) -> None:
    """So much time goes by that what was left behind is swept."""
    store = RedisStore(redis_url)
    await ContentsApart(store, WatchedHome(make_home(place))).tidy(time.time() + LEFT_BEHIND_S + 60)
    await store.close()


def content_names(place: str, s3: S3Process | None) -> set[str]:
    """What the directory or the bucket has."""
    names = s3.keys() if s3 and "://" in place else [str(each) for each in Path(place).rglob("file-*")]
    return {name.split("/")[-1] for name in names}


@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("place", HOMES, indirect=True)
def test_files_come_back_run_and_go(place: str, s3: S3Process) -> None:
    async def scenario(at: System) -> None:
        sent = await at.gateway.upload(LARGE, "näme.jsonl")
        got = await at.client.files.content(sent.id)
        assert got.read() == LARGE and got.response.headers["content-length"] == str(len(LARGE))
        empty = await at.gateway.upload(b"")
        assert (await at.client.files.content(empty.id)).read() == b""
        batch = await at.gateway.until(await at.gateway.submit([*questions(20), bad()]), "completed")
        lines = await at.gateway.lines_of(batch.output_file_id)
        assert [line["custom_id"] for line in lines] == [f"q{number}" for number in range(20)]
        assert len(await at.gateway.lines_of(batch.error_file_id)) == 1
        listed = {file.id for file in (await at.client.files.list()).data}
        assert content_names(place, s3) == listed - {empty.id}
        # what Redis has of them is their records
        assert await stored(at.redis.url, "bytes") < 5000 < len(LARGE) < await stored(at.redis.url)
        for file_id in listed:
            assert (await at.client.files.delete(file_id)).deleted
        assert not content_names(place, s3) and not await stored(at.redis.url)

    play(scenario, files_at=place)


def bad() -> dict[str, Any]:
    return {"custom_id": "bad", "method": "POST", "url": CHATS, "body": {"model": "demo", "messages": "x"}}


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("place", HOMES, indirect=True)
def test_what_is_refused_or_broken_off_leaves_nothing(place: str, s3: S3Process) -> None:
    async def scenario(at: System) -> None:
        with pytest.raises(openai.APIStatusError, match="larger than 8000000 bytes") as error:
            await at.gateway.upload(LARGE + bytes(530_000))
        assert error.value.status_code == 413
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await at.client.files.create(file=("in", LARGE), purpose="assistants")
        with pytest.raises(httpx2.TransportError):
            await at.gateway.http.post("/v1/files", content=half_a_form(broken=True), headers=FORM)
        while content_names(place, s3) or s3.unfinished() or await stored(at.redis.url):
            await asyncio.sleep(0.05)
        assert not (await at.client.files.list()).data

    play(scenario, files_at=place, limits=CallLimits(max_file_bytes=8_000_000))


FORM = {"Content-Type": "multipart/form-data; boundary=B"}


async def half_a_form(broken: bool) -> AsyncIterator[bytes]:
    """The beginning of an upload; then the client goes, or nothing comes any more."""
    head = '--B\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n'
    yield f"{head.format('purpose', '')}batch\r\n".encode()
    yield head.format("file", '; filename="in.jsonl"').encode()
    for start in range(0, len(LARGE), 1 << 16):
        yield LARGE[start : start + (1 << 16)]
    if broken:
        raise httpx2.ReadError("the client goes")
    await asyncio.Event().wait()


@pytest.mark.slow
def test_while_the_bucket_is_away_files_answer_503_and_jobs_wait(s3: S3Process) -> None:
    s3.empty()

    async def scenario(at: System) -> None:
        sent = await at.gateway.upload(LARGE)
        waiting = await at.gateway.upload(questions(3))
        at.router.allowed = 0
        ending = await at.gateway.until(await at.gateway.submit(questions(2)), "in_progress")
        while len(at.router.submitted) < 2:
            await asyncio.sleep(0.02)
        s3.kill()
        assert (await at.gateway.http.get("/health")).json() == {"status": "ok"}
        for size in (10, len(LARGE)):
            with pytest.raises(openai.InternalServerError, match="store can't be reached") as error:
                await at.gateway.upload(LARGE[:size])
            assert error.value.status_code == 503 and error.value.response.headers["retry-after"] == "1"
        with pytest.raises(httpx2.TransportError):
            await at.gateway.http.get(f"/v1/files/{sent.id}/content")
        health = (await at.gateway.http.get("/health")).json()
        assert (health["status"], health["files"]) == ("degraded", "down")
        assert "--files-at" in health["reason"]
        batch = await at.client.batches.create(
            input_file_id=waiting.id, endpoint=CHATS, completion_window="24h"
        )
        at.router.allow(None)
        await at.gateway.until(ending, "finalizing")
        assert (await at.client.batches.retrieve(batch.id)).status == "validating"
        # the bucket is empty when it is back: what is in progress is written, and what is gone is told
        s3.start()
        done = await at.gateway.until(ending, "completed")
        assert len(await at.gateway.lines_of(done.output_file_id)) == 2
        failed = await at.gateway.until(batch, "failed")
        assert failed.errors and failed.errors.data
        assert [each.code for each in failed.errors.data] == ["file_not_found"]
        while (await at.gateway.http.get("/health")).json() != {"status": "ok"}:
            await asyncio.sleep(0.05)

    play(scenario, files_at=f"s3://{BUCKET}/kept")


def test_on_a_full_disk_files_answer_503_and_jobs_wait(tmp_path: Path) -> None:
    async def scenario(at: System) -> None:
        ending = await at.gateway.submit(questions(2))
        at.router.allowed = 0
        await at.gateway.until(ending, "in_progress")
        while len(at.router.submitted) < 2:
            await asyncio.sleep(0.02)
        # Not even a probe has room.
        with files_of_at_most(4):
            with pytest.raises(openai.InternalServerError, match="store can't be reached") as error:
                await at.gateway.upload(LARGE)
            assert error.value.status_code == 503
            health = (await at.gateway.http.get("/health")).json()
            assert (health["status"], health["files"]) == ("degraded", "down")
            at.router.allow(None)
            await at.gateway.until(ending, "finalizing")
            assert (await at.client.batches.retrieve(ending.id)).status == "finalizing"
        done = await at.gateway.until(ending, "completed")
        assert len(await at.gateway.lines_of(done.output_file_id)) == 2
        assert len(content_names(str(tmp_path / "kept"), None)) == 2

    play(scenario, files_at=str(tmp_path / "kept"))


# ---- kill -9 ----


def _serve(config: GatewayConfig) -> None:
    GatewayProcess(config).run()


@asynccontextmanager
async def process_on(
    router_port: int, redis_url: str, place: str
) -> AsyncIterator[tuple[SpawnProcess, Gateway]]:
    """A gateway in a process of its own."""
    port = free_port("127.0.0.1")
    address = RouterAddress("127.0.0.1", router_port, TOKEN)
    config = GatewayConfig(
        *(InstanceId("gateway-0"), (address,), EngineConfig(str(demo.MODEL_DIR)), "demo"),
        HttpConfig("127.0.0.1", port),
        store_url=redis_url,
        files_at=place,
        batches=QUICK,
    )
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(config,))
    process.start()
    url = f"http://127.0.0.1:{port}"
    try:
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            httpx2.AsyncClient(base_url=url, timeout=20) as http,
        ):
            while True:
                try:
                    await http.get("/health")
                    break
                except httpx2.TransportError:
                    assert process.is_alive()
                    await asyncio.sleep(0.05)
            yield process, Gateway(client, http, GatewayProcess(config))
    finally:
        process.kill()
        process.join()


def play_with_process(scenario: Callable[[ScriptedRouter, int, str], Awaitable[None]]) -> None:
    async def within_time() -> None:
        router = ScriptedRouter()
        port = await router.hub.listen("127.0.0.1", 0)
        async with asyncio.timeout(240), redis_running() as redis:
            await scenario(router, port, redis.url)
        router.hub.close()

    asyncio.run(within_time())


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("place", HOMES, indirect=True)
def test_an_upload_whose_gateway_is_killed_is_no_file_and_is_swept(place: str, s3: S3Process) -> None:
    async def scenario(router: ScriptedRouter, port: int, redis_url: str) -> None:
        async with process_on(port, redis_url, place) as (process, gateway):
            kept = await gateway.upload(LARGE)
            upload = gateway.http.post("/v1/files", content=half_a_form(broken=False), headers=FORM)
            sending = asyncio.create_task(upload)
            # so much of it is in its place
            while await stored(redis_url) < len(LARGE) + 6 * (1 << 20):
                assert not sending.done()
                await asyncio.sleep(0.02)
            process.kill()
            # A client that has nothing to send just now does not notice.
            sending.cancel()
            await asyncio.wait({sending})
        assert await stored(redis_url) > len(LARGE)
        await swept(redis_url, place)
        assert await stored(redis_url) == len(LARGE) and content_names(place, s3) == {kept.id}
        async with gateway_on(port, redis_url, files_at=place) as other:
            assert [file.id for file in (await other.client.files.list()).data] == [kept.id]
            assert (await other.client.files.content(kept.id)).read() == LARGE

    play_with_process(scenario)


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("place", HOMES, indirect=True)
def test_output_files_whose_gateway_is_killed_are_written_once(place: str, s3: S3Process) -> None:
    async def scenario(router: ScriptedRouter, port: int, redis_url: str) -> None:
        store = RedisStore(redis_url)
        async with process_on(port, redis_url, place) as (process, gateway):
            batch = await gateway.submit([*questions(300), bad()])
            # a bucket that hangs holds the gateway in the middle of it; a directory is left at some moment
            while (await store.tally(batch.id)).num_completed < 300:  # type: ignore[arg-type]
                await asyncio.sleep(0.01)
            if "://" in place:
                s3.pause()
            job = await store.job(batch.id)  # type: ignore[arg-type]
            while job and job.status == "in_progress":
                job = await store.job(batch.id)  # type: ignore[arg-type]
            process.kill()
            process.join()
            s3.go_on()
        async with gateway_on(port, redis_url, files_at=place) as other:
            done = await until_over(other, batch)
            assert done.status == "completed"
            lines = await other.lines_of(done.output_file_id)
            assert [line["custom_id"] for line in lines] == [f"q{number}" for number in range(300)]
            assert len(await other.lines_of(done.error_file_id)) == 1
        await swept(redis_url, place)
        kept = {done.input_file_id, done.output_file_id, done.error_file_id}
        assert content_names(place, s3) == kept
        assert {file.id for file in await store.files(list(kept))} == kept  # type: ignore[arg-type]
        await store.close()

    play_with_process(scenario)


async def until_over(gateway: Gateway, batch: Batch) -> Batch:
    found = await gateway.client.batches.retrieve(batch.id)
    while found.status not in ("completed", "failed"):
        await asyncio.sleep(0.02)
        found = await gateway.client.batches.retrieve(batch.id)
    return found


# ---- inputs that are not uploaded ----


@pytest.fixture
def inputs(tmp_path: Path, s3: S3Process) -> Path:
    s3.empty()
    folder = tmp_path / "inputs"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(jsonl(questions(1)))
    return folder


def write(url: str, content: bytes, s3: S3Process) -> None:
    if url.startswith("file"):
        Path(url.removeprefix("file://")).write_bytes(content)
    else:
        s3.put(url.removeprefix(f"s3://{BUCKET}/"), content)


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("kind", HOMES)
def test_a_batch_reads_its_input_where_it_is_unless_it_changes(
    inputs: Path, s3: S3Process, kind: str
) -> None:
    url = f"s3://{BUCKET}/in/a.jsonl" if kind == "bucket" else f"file://{inputs}/a.jsonl"

    async def scenario(at: System) -> None:
        create: Any = at.client.batches.create
        asked = {"input_file_id": url, "endpoint": CHATS, "completion_window": "24h"}
        with pytest.raises(openai.BadRequestError, match="there is no such file"):
            await create(**asked)
        write(url, jsonl(questions(30)), s3)
        batch = await at.gateway.until(await create(**asked), "completed")
        assert batch.input_file_id == url and len(await at.gateway.lines_of(batch.output_file_id)) == 30
        assert {file.purpose for file in (await at.client.files.list()).data} == {"batch_output"}
        # it changes after it was validated: what is read again, after the gateway has gone, is another file
        at.router.allowed = 0
        batch = await at.gateway.until(await create(**asked), "in_progress")
        at.gateway.process.stop()
        write(url, jsonl(questions(31)), s3)
        async with gateway_on(
            at.router_port, at.redis.url, config=reading(inputs), name="gateway-1"
        ) as other:
            failed = await other.until(batch, "failed")
            assert failed.errors and failed.errors.data and failed.errors.data[0].code == "input_changed"
            assert "has changed since the batch was created" in str(failed.errors.data[0].message)

    play(scenario, config=reading(inputs))


def reading(inputs: Path) -> Any:
    return replace(QUICK, inputs_from=(str(inputs), f"s3://{BUCKET}/in"))


def test_urls_elsewhere_are_refused_and_say_what_is_allowed(inputs: Path, s3: S3Process) -> None:
    urls = [
        *(f"file://{inputs.parent}/secret", f"file://{inputs}/../secret", f"file://{inputs}/%2e%2e/secret"),
        *(f"file://{inputs.parent}/nothing", "file:///etc/passwd", "http://127.0.0.1/x", "s3://other/in/x"),
        *(f"s3://{BUCKET}/secret", f"s3://{BUCKET}/in/../secret", f"s3://{BUCKET}/in/%2e%2e/secret"),
    ]

    async def scenario(at: System) -> None:
        for url in urls:
            body = {"input_file_id": url, "endpoint": CHATS, "completion_window": "24h"}
            answer = await at.gateway.http.post("/v1/batches", json=body)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == "input_file_id", url
            assert f"only under {inputs}, s3://{BUCKET}/in" in error["message"] or "must " in error["message"]
        large = inputs / "large"
        large.write_bytes(bytes(1001))
        body = {"input_file_id": f"file://{large}", "endpoint": CHATS, "completion_window": "24h"}
        answer = await at.gateway.http.post("/v1/batches", json=body)
        assert answer.status_code == 400 and "may have 1000" in json.dumps(answer.json())

    play(scenario, config=reading(inputs), limits=CallLimits(max_file_bytes=1000))
