"""Repeats calls of the store until it is reachable: a job waits for it as long as that takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from alignedserve.store import BrokenOff, StoreAway

RETRY_S = 0.2

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
