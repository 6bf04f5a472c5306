"""A process's connection to a store, on which things go wrong: the store is away, it is slow, answers are lost.

A call that was sent reaches the store even if its caller is cancelled or its process killed meanwhile. A call whose
answer is lost raises StoreAway although the change was made.
"""

from __future__ import annotations

import asyncio
import contextvars
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from alignedserve.store.base import Store, StoreAway
from alignedserve.vopr.front_end.history import History


@dataclass
class StoreFaults:
    """What goes wrong now, for all processes; a driver changes it."""

    # Whether no call reaches the store, and no answer its caller.
    is_away: bool = False
    # Returns the seconds that a call, or its answer, takes.
    delay_s: Callable[[], float] = lambda: 0.0005
    # Returns whether the next answer is lost.
    loses_answer: Callable[[], bool] = lambda: False
    # The seconds after which a caller whose call or answer is lost gives up.
    timeout_s: float = 2.0
    # This is called with each call that was made at the store: its name, arguments and result.
    observe: Callable[[str, Sequence[Any], Any], None] = lambda method, args, result: None


class _Link(Store):
    def __init__(self, store: Store, faults: StoreFaults, history: History, name: str) -> None:
        self._store = store
        self._faults = faults
        self._history = history
        self._name = name
        self._is_down = False

    async def close(self) -> None:
        """The store goes on."""

    @property
    def is_down(self) -> bool:
        return self._is_down

    async def probe(self) -> None:
        await self.call("probe")
        self._is_down = False

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        # It runs in no process's context, as what has left a process is not in its hands any more.
        serving = asyncio.get_running_loop().create_task(
            self._serve(method, args, options), context=contextvars.Context()
        )
        serving.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            return await asyncio.shield(serving)
        except StoreAway:
            self._is_down = True
            raise

    async def _serve(self, method: str, args: Any, options: Any) -> Any:
        faults = self._faults
        await asyncio.sleep(faults.delay_s())
        if faults.is_away:
            await self._lost(method, "call")
        outcome: Any = None
        try:
            outcome = await getattr(self._store, method)(*args, **options)
            faults.observe(method, args, outcome)
            return outcome
        except Exception as error:
            outcome = error
            raise
        finally:
            asked = zlib.crc32(repr((args, options)).encode())
            self._history.add(self._name, method, asked, zlib.crc32(repr(outcome).encode()))
            await asyncio.sleep(faults.delay_s())
            if faults.is_away or faults.loses_answer():
                await self._lost(method, "answer")

    async def _lost(self, method: str, what: str) -> None:
        self._history.add(self._name, method, f"{what} lost")
        await asyncio.sleep(self._faults.timeout_s)
        raise StoreAway(f"{method}: its {what} was lost")


def _forwarding(method: str) -> Callable[..., Any]:
    async def forward(link: _Link, *args: Any, **options: Any) -> Any:
        return await link.call(method, *args, **options)

    return forward


_made = {name: _forwarding(name) for name in sorted(_Link.__abstractmethods__)}
_WholeLink: Any = type("StoreLink", (_Link,), _made)


def link_to(store: Store, faults: StoreFaults, history: History, name: str) -> Store:
    """Returns the connection of the process of this name to the store."""
    return cast(Store, _WholeLink(store, faults, history, name))
