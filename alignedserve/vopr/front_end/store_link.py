"""A process's connection to a store, with faults: the store is away or slow, and answers are lost.

A call that was sent reaches the store even if its caller is cancelled or its process killed meanwhile. A call with a
lost answer raises StoreAway, although the change was made.
"""

from __future__ import annotations

import asyncio
import contextvars
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

from alignedserve.store.base import Store
from alignedserve.store.homes.base import StoreAway
from alignedserve.vopr.front_end.journal import Journal


class StoreFaults:
    """The faults of each process's calls. This class has none."""

    # Seconds after which a caller gives up a lost call or answer.
    timeout_s = 2.0

    def is_away(self, process: str) -> bool:
        """Returns whether calls of the process don't reach the store, nor answers the process."""
        return False

    def delay_s(self, process: str) -> float:
        """Returns the seconds that the next call, or its answer, takes."""
        return 0.0005

    def loses_answer(self, process: str) -> bool:
        """Returns whether the next answer is lost."""
        return False


class StoreObserver:
    """An observer of calls. Its exceptions are errors of the run, and don't reach the caller."""

    def asks(self, process: str, method: str, args: Sequence[Any]) -> None:
        """Called when a process makes a call."""

    def made(self, process: str, method: str, args: Sequence[Any], result: Any) -> None:
        """Called when the store has executed a call."""

    def hears(self, process: str, method: str, args: Sequence[Any], outcome: Any) -> None:
        """Called when a process has the answer of a call, which may be an exception."""


class _Link(Store):
    def __init__(
        self,
        store: Store,
        faults: StoreFaults,
        observers: Sequence[StoreObserver],
        journal: Journal,
        name: str,
    ) -> None:
        self._store = store
        self._faults = faults
        self._observers = observers
        self._journal = journal
        # The name of this life of the process, and of all of its lives.
        self._name, self._process = name, name.split(" ")[0]
        self._is_down = False

    async def close(self) -> None:
        """Does nothing: the store outlives its connections."""

    @property
    def is_down(self) -> bool:
        return self._is_down

    async def probe(self) -> None:
        await self.call("probe")
        self._is_down = False

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        self._tell("asks", method, args)
        # Runs outside the caller's context: a command already sent to the store takes effect even if its sender dies.
        serving = asyncio.get_running_loop().create_task(
            self._serve(method, args, options), context=contextvars.Context()
        )
        serving.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            result = await asyncio.shield(serving)
        except StoreAway:
            self._is_down = True
            raise
        except Exception as error:
            self._tell("hears", method, args, error)
            raise
        self._tell("hears", method, args, result)
        return result

    def _tell(self, event: Literal["asks", "made", "hears"], *what: Any) -> None:
        try:
            for observer in self._observers:
                getattr(observer, event)(self._name, *what)
        except Exception as error:
            context = {"message": f"{what[0]} is not right", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    async def _serve(self, method: str, args: Any, options: Any) -> Any:
        faults, process = self._faults, self._process
        await asyncio.sleep(faults.delay_s(process))
        if faults.is_away(process):
            await self._lost(method, "call")
        outcome: Any = None
        try:
            outcome = await getattr(self._store, method)(*args, **options)
            self._tell("made", method, args, outcome)
            return outcome
        except Exception as error:
            outcome = error
            raise
        finally:
            asked = zlib.crc32(repr((args, options)).encode())
            self._journal.add(self._name, method, asked, zlib.crc32(repr(outcome).encode()))
            await asyncio.sleep(faults.delay_s(process))
            if faults.is_away(process) or faults.loses_answer(process):
                await self._lost(method, "answer")

    async def _lost(self, method: str, what: str) -> None:
        self._journal.add(self._name, method, f"{what} lost")
        await asyncio.sleep(self._faults.timeout_s)
        raise StoreAway(f"{method}: its {what} was lost")


def _forwarding(method: str) -> Callable[..., Any]:
    async def forward(link: _Link, *args: Any, **options: Any) -> Any:
        return await link.call(method, *args, **options)

    return forward


_made = {name: _forwarding(name) for name in sorted(_Link.__abstractmethods__)}
_WholeLink: Any = type("StoreLink", (_Link,), _made)


def link_to(
    store: Store, faults: StoreFaults, observers: Sequence[StoreObserver], journal: Journal, name: str
) -> Store:
    """Returns the connection of the process with this name to the store."""
    return cast(Store, _WholeLink(store, faults, observers, journal, name))
