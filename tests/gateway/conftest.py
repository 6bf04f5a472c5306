from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.gateway.served import SharedGateway


@pytest.fixture(scope="module", autouse=True)
def uvicorn_looks_often() -> Iterator[None]:
    """uvicorn looks ten times a second whether it is to end, and when it ends it waits as long once more: together as
    long as most of these tests take."""

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 20)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uvicorn.server.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
        yield


@pytest.fixture(scope="module")
def gateway() -> Iterator[SharedGateway]:
    """What is refused, and what leaves nothing behind, is asked of one gateway for all cases of a file."""
    with SharedGateway.running() as found:
        yield found
