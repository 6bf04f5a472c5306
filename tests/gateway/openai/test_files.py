"""/v1/files with OpenAI's own client, on a real Redis."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx2
import openai
import pytest
from openai.types import FileObject

from alignedserve.gateway.http.multipart import MAX_FIELD_BYTES
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.store import redis_connection
from tests.gateway.batching import System, play, questions
from tests.gateway.served import play as gateway_alone
from tests.gateway.served import served
from tests.store.redis_process import redis_running


def test_a_file_comes_back_as_it_was_sent() -> None:
    async def scenario(at: System) -> None:
        # several chunks, and a piece
        content = os.urandom(3_500_000)
        sent = await at.gateway.upload(content, "näme.jsonl")
        assert (sent.filename, sent.bytes, sent.purpose, sent.object) == (
            "näme.jsonl",
            len(content),
            "batch",
            "file",
        )
        assert await at.client.files.retrieve(sent.id) == sent
        got = await at.client.files.content(sent.id)
        assert got.read() == content and got.response.headers["content-length"] == str(len(content))
        gone = await at.client.files.delete(sent.id)
        assert gone.deleted and gone.id == sent.id
        asked: list[Callable[[str], Awaitable[object]]] = [
            at.client.files.retrieve,
            at.client.files.content,
            at.client.files.delete,
        ]
        for asking in asked:
            with pytest.raises(openai.NotFoundError) as error:
                await asking(sent.id)
            assert error.value.param == "file_id"

    play(scenario)


def test_an_empty_file_is_a_file() -> None:
    async def scenario(at: System) -> None:
        sent = await at.gateway.upload(b"")
        assert sent.bytes == 0 and (await at.client.files.content(sent.id)).read() == b""

    play(scenario)


def test_files_are_listed_newest_first_in_pages() -> None:
    async def scenario(at: System) -> None:
        sent = [await at.gateway.upload(b"x", f"{number}.jsonl") for number in range(5)]
        newest = await at.client.files.list(limit=2)
        assert [file.id for file in newest.data] == [sent[4].id, sent[3].id] and newest.has_more
        # the client asks for the further pages itself
        assert [file.id async for file in newest] == [file.id for file in reversed(sent)]
        oldest = await at.client.files.list(order="asc", after=sent[1].id, purpose="batch")
        assert [file.id for file in oldest.data] == [file.id for file in sent[2:]] and not oldest.has_more
        nothing = (await at.gateway.http.get("/v1/files?purpose=assistants")).json()
        assert nothing == {
            "object": "list",
            "data": [],
            "first_id": None,
            "last_id": None,
            "has_more": False,
        }

    play(scenario)


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=file-1", "after")],
)
def test_a_bad_query_names_the_parameter(query: str, param: str) -> None:
    async def scenario(at: System) -> None:
        answer = await at.gateway.http.get(f"/v1/files?{query}")
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")

    play(scenario)


BAD_FORMS = {
    "purpose": ({"purpose": "fine-tune"}, {"file": ("x", b"x")}),
    "no purpose": ({}, {"file": ("x", b"x")}),
    "no file": ({"purpose": "batch"}, {"other": ("x", b"x")}),
    "unknown field": ({"purpose": "batch", "more": "x"}, {"file": ("x", b"x")}),
    "expiry": (
        {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "5"},
        {"file": ("x", b"x")},
    ),
}


@pytest.mark.parametrize(
    ("form", "param"),
    list(zip(BAD_FORMS.values(), ["purpose", "purpose", "other", "more", "expires_after"], strict=True)),
    ids=BAD_FORMS.keys(),
)
def test_a_bad_upload_names_the_field_and_leaves_nothing(
    form: tuple[dict[str, str], dict[str, tuple[str, bytes]]], param: str
) -> None:
    async def scenario(at: System) -> None:
        data, files = form
        answer = await at.gateway.http.post("/v1/files", data=data, files=files)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert (await at.client.files.list()).data == []

    play(scenario)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=x", b"nothing of the kind"),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="file"'),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Type: text/plain\r\n\r\nx\r\n--x--\r\n"),
    ],
)
def test_what_is_no_form_is_refused(kind: str, body: bytes) -> None:
    async def scenario(at: System) -> None:
        answer = await at.gateway.http.post("/v1/files", content=body, headers={"Content-Type": kind})
        assert answer.status_code == 400 and "multipart/form-data" in answer.json()["error"]["message"]

    play(scenario)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (5, "file: must have a filename"),
        (MAX_FIELD_BYTES + 1, "fields without a filename have more than 65536"),
    ],
)
def test_a_file_without_a_name_is_told_so(size: int, message: str) -> None:
    async def scenario(at: System) -> None:
        form = {"purpose": (None, b"batch"), "file": (None, b"x" * size)}
        answer = await at.gateway.http.post("/v1/files", files=form)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]

    play(scenario)


def test_a_file_that_says_it_is_too_large_is_refused_before_it_is_read() -> None:
    async def scenario(at: System) -> None:
        host, port = at.gateway.http.base_url.host, at.gateway.http.base_url.port
        reader, writer = await asyncio.open_connection(host, port)
        head = (
            "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
            f"Content-Length: {CallLimits().max_file_bytes * 2}\r\n\r\n"
        )
        writer.write(head.encode())
        assert b" 413 " in await reader.readline()
        writer.close()

    play(scenario)


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_file_may_have_as_many_bytes_as_the_limit_says_and_no_more(is_announced: bool) -> None:
    async def scenario() -> None:
        async with (
            redis_running() as redis,
            served(store_url=redis.url, limits=CallLimits(max_file_bytes=1000)) as at,
        ):

            async def upload(size: int) -> httpx2.Response:
                form = at.http.build_request(
                    "POST", "/v1/files", data={"purpose": "batch"}, files={"file": b"x" * size}
                )
                content = form.read()

                async def piece() -> AsyncIterator[bytes]:
                    yield content

                kind = {"Content-Type": form.headers["content-type"]}
                return await at.http.post(
                    "/v1/files", content=content if is_announced else piece(), headers=kind
                )

            sent = await upload(1000)
            assert (sent.status_code, sent.json()["bytes"]) == (200, 1000)
            refused = await upload(1001)
            assert (refused.status_code, refused.json()["error"]["code"]) == (413, "file_too_large")
            assert "larger than 1000 bytes" in refused.json()["error"]["message"]
            # It hears why even if it sends all of it first.
            assert (await upload(64 << 20)).status_code == 413
            assert (await at.client.files.list()).data == [FileObject.model_validate(sent.json())]

    gateway_alone(scenario)


def test_a_file_that_asks_to_expire_says_when() -> None:
    async def scenario(at: System) -> None:
        sent = await at.client.files.create(
            file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert sent.expires_at == sent.created_at + 3600

    play(scenario)


def test_while_redis_is_away_files_answer_503_and_chats_go_on() -> None:
    async def scenario(at: System) -> None:
        sent = await at.gateway.upload(questions(1))
        await at.redis.kill()
        for call in (at.client.files.list, at.client.batches.list):
            with pytest.raises(openai.InternalServerError) as error:
                await call()
            assert error.value.status_code == 503
            assert error.value.response.headers["retry-after"] == "1"
            # where it is on this machine is nobody's business
            assert "/" not in error.value.message and "sock" not in error.value.message
        health = (await at.gateway.http.get("/health")).json()
        assert (health["status"], health["store"]) == ("degraded", "down")
        chat = await at.client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "How far?"}]
        )
        assert chat.choices[0].message.content == "one two three"
        await at.redis.start()
        assert await at.client.files.retrieve(sent.id) == sent
        # it is well when it has taken a write
        while (await at.gateway.http.get("/health")).json() != {"status": "ok"}:
            await asyncio.sleep(0.02)

    play(scenario)


def test_while_redis_hangs_nobody_else_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_connection, "PATIENCE_S", 0.3)
    # those who wait already wait for longer than this test takes
    monkeypatch.setattr(redis_connection, "TIMEOUT_S", 50.0)

    async def scenario(at: System) -> None:
        at.redis.pause()
        # Those that ask before it is known to hang wait; how long that takes is the machine's business.
        waiting: list[asyncio.Task[httpx2.Response]] = []
        while True:
            asked = asyncio.create_task(at.gateway.http.get("/v1/files", timeout=50))
            done, _ = await asyncio.wait({asked}, timeout=0.1)
            if done:
                break
            waiting.append(asked)
        assert waiting and asked.result().status_code == 503
        for _ in range(20):
            answer = await at.gateway.http.get("/v1/files")
            assert answer.status_code == 503 and not any(each.done() for each in waiting)
        assert (await at.gateway.http.get("/health")).json()["store"] == "down"
        at.redis.go_on()
        assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
        assert (await at.gateway.http.get("/v1/files")).status_code == 200

    play(scenario)
