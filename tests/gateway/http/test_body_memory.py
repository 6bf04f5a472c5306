"""Memory that the bodies of all requests share, and which bodies are JSON."""

from __future__ import annotations

import asyncio

import pytest
from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import Message

from alignedserve.gateway.http.errors import ApiError, BodyError
from alignedserve.gateway.http.reading import SMALL_BYTES, BodyMemory, BodyReading, Share, json_body


def test_small_bodies_are_taken_however_much_others_have() -> None:
    memory = BodyMemory(4 * SMALL_BYTES)
    large, small = Share(memory, "one"), Share(memory, "other")
    assert large.can_grow(2 * SMALL_BYTES) and not large.can_grow(2 * SMALL_BYTES + 1), "half of it"
    memory.add("a third", 4 * SMALL_BYTES)
    assert not large.can_grow(SMALL_BYTES + 1)
    assert small.can_grow(SMALL_BYTES)
    small.grow(SMALL_BYTES)
    assert memory.num_bytes == 5 * SMALL_BYTES


def test_what_is_added_after_the_end_of_a_body_does_not_count() -> None:
    memory = BodyMemory(8 * SMALL_BYTES)
    with memory.share("one") as share:
        share.add(SMALL_BYTES)
    for more in (-SMALL_BYTES, SMALL_BYTES):
        share.add(more)
        assert not memory._num_bytes and share.num_bytes == 0


def test_a_body_that_is_still_read_leaves_what_else_counts_in_its_share() -> None:
    """What a call leads to is counted, perhaps, before the last byte of its body has come."""
    memory = BodyMemory(8 * SMALL_BYTES)
    pieces = [b"x", b"y" * SMALL_BYTES, b"z" * 4 * SMALL_BYTES]

    async def receive() -> Message:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def scenario() -> None:
        with memory.share("one") as share:
            reading = BodyReading(
                receive, Headers({"transfer-encoding": "chunked"}), share, 1 << 30, 2 * SMALL_BYTES
            )
            share.add(3 * SMALL_BYTES - 1)
            await reading.receive()
            assert memory.num_bytes == 3 * SMALL_BYTES
            await reading.receive()
            assert memory.num_bytes == 4 * SMALL_BYTES
            with pytest.raises(BodyError):
                await reading.receive()
        assert memory.num_bytes == 0

    asyncio.run(scenario())


async def body_of(content_type: str) -> list[bytes]:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    headers = [(b"content-type", content_type.encode())] if content_type else []
    return await json_body(Request({"type": "http", "method": "POST", "headers": headers}, receive))


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/problem+json",
        "application/vnd.a+json;b=c",
    ],
)
def test_a_body_of_json_is_read(content_type: str) -> None:
    assert asyncio.run(body_of(content_type)) == [b"{}"]


@pytest.mark.parametrize(
    "content_type", ["", "text/json", "application/jsonl", "text/plain+json", "application/x-json+a"]
)
def test_a_body_of_another_type_is_refused(content_type: str) -> None:
    with pytest.raises(ApiError, match="the body must be JSON"):
        asyncio.run(body_of(content_type))
