"""Repeats calls of the store until it is reachable. A job waits for it for any length of time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from alignedserve.store import BrokenOff, StoreAway

RETRY_S = 0.2
# Seconds for which a call is repeated that the client could only repeat differently, such as with another id. A restart
# of Redis takes less.
PATIENCE_S = 10.0

Args = ParamSpec("Args")
Result = TypeVar("Result")


async def retried(call: Callable[Args, Awaitable[Result]], *args: Args.args, **kwargs: Args.kwargs) -> Result:
    """Returns the result once the store is reachable. Every change may be repeated (alignedserve/store/base.py), except
    after BrokenOff: then the caller starts over."""
    while True:
        try:
            return await call(*args, **kwargs)
        except BrokenOff:
            raise
        except StoreAway:
            await asyncio.sleep(RETRY_S)


async def repeated(
    call: Callable[Args, Awaitable[Result]], *args: Args.args, **kwargs: Args.kwargs
) -> Result:
    """Returns the result. A call may seem to fail although the store has carried it out, and its caller would start
    over with another id. So it is repeated for a while. Raises StoreAway."""
    clock = asyncio.get_running_loop().time
    until_s = clock() + PATIENCE_S
    while True:
        try:
            return await call(*args, **kwargs)
        except BrokenOff:
            raise
        except StoreAway:
            if clock() >= until_s:
                raise
            await asyncio.sleep(RETRY_S)
