"""Runs what happens in a test's event loop, and gives it up in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

# Seconds: far more than any takes, also beside others.
LIMIT_S = 120.0


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within_time() -> None:
        async with asyncio.timeout(LIMIT_S):
            await scenario()

    asyncio.run(within_time())
