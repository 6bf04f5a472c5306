"""A gateway in front of a scripted island, in its own thread, because a test that drives a browser blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from alignedserve.gateway.http.keys import Keys
from tests.gateway.scripted import ScriptedRouter
from tests.gateway.served import served
from tests.store.redis_process import redis_running

TIMEOUT_S = 60.0


@dataclass
class Hosted:
    url: str
    router: ScriptedRouter
    loop: asyncio.AbstractEventLoop
    over: asyncio.Event
    keys: Keys

    def do(self, call: Callable[[], object]) -> None:
        """Calls it in the gateway's thread."""
        self.loop.call_soon_threadsafe(call)


@contextmanager
def hosted(
    router: ScriptedRouter | None = None, has_store: bool = False, **settings: Any
) -> Iterator[Hosted]:
    """`settings`: fields of GatewayConfig and HttpConfig."""
    begun: Future[Hosted] = Future()

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            if has_store:
                redis = await stack.enter_async_context(redis_running())
                settings["store_url"] = redis.url
            at = await stack.enter_async_context(served(router, **settings))
            over = asyncio.Event()
            loop = asyncio.get_running_loop()
            begun.set_result(Hosted(str(at.http.base_url), at.router, loop, over, at.process._keys))
            await over.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    at = begun.result(TIMEOUT_S)
    try:
        yield at
    finally:
        at.do(at.over.set)
        thread.join(TIMEOUT_S)
    assert not thread.is_alive()
