"""What a call does for a client that hangs up."""

from __future__ import annotations

import asyncio

import pytest
from fastapi import Request
from starlette.types import Message

from alignedserve.gateway.generation.responding import unless_gone
from alignedserve.gateway.http.errors import ApiError


def test_work_for_a_client_that_has_gone_has_ended_before_the_call_does() -> None:
    events: list[str] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            events.append("work")

    async def scenario() -> None:
        with pytest.raises(ApiError, match="hung up"):
            await unless_gone(Request({"type": "http"}, receive), work())
        events.append("call")

    asyncio.run(scenario())
    assert events == ["work", "call"]
