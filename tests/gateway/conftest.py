from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.gateway.served import SharedGateway


@pytest.fixture(scope="module", autouse=True)
def uvicorn_looks_often() -> Iterator[None]:
    """uvicorn checks ten times a second whether it should stop, and waits as long once more when it stops. Together
    that takes as long as most of these tests."""

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 20)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uvicorn.server.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
        yield


@pytest.fixture(scope="module")
def gateway() -> Iterator[SharedGateway]:
    """One gateway for all cases in a file, for requests that are refused or leave nothing behind."""
    with SharedGateway.running() as found:
        yield found
