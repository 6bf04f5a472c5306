"""Repeats calls of the store until it is reachable: a job waits for it as long as that takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from alignedserve.store import BrokenOff, StoreAway

RETRY_S = 0.2
# What a client would repeat in another way, such as under another name, is repeated here for so long: a Redis that is
# started again takes no longer.
PATIENCE_S = 10.0

Args = ParamSpec("Args")
Result = TypeVar("Result")


async def retried(call: Callable[Args, Awaitable[Result]], *args: Args.args, **kwargs: Args.kwargs) -> Result:
    """Returns the result, once the store is reachable. Every change may be repeated (alignedserve/store/base.py), but
    for what raises BrokenOff: its caller begins again."""
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
    """Returns the result. A call that the store has carried out may seem to have failed, and its caller would begin
    again with another id: so this one is repeated for a while. Raises StoreAway."""
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
