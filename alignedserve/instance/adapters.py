"""Loads and unloads adapters while an instance runs.

Files are read and weights written on a thread of their own, into places that no request uses (`AdapterPlaces`). What
requests may use changes only between two iterations. Orders are obeyed one after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Protocol

from alignedserve.protocol.messages import AdapterAt, AdaptersSet, AnyMessage, SetAdapters
from alignedserve.types import InvalidRequest

logger = logging.getLogger(__name__)


class AdapterPlaces(Protocol):
    """See `engine/adapter_places.py`."""

    @property
    def numbers(self) -> Mapping[str, int]: ...

    def write(self, name: str, directory: Path) -> int: ...

    def set(self, name: str, number: int) -> None: ...

    def remove(self, name: str) -> None: ...


class AdapterLoader:
    def __init__(self, places: AdapterPlaces, wake: Callable[[], object]) -> None:
        """`wake` is called on any thread when `go_on` has something to do."""
        self._places = places
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        # The order that is being obeyed, and the latest one if that is another.
        self._order: SetAdapters | None = None
        self._next: SetAdapters | None = None
        # The adapter that is being written.
        self._writing: tuple[AdapterAt, Future[int]] | None = None
        self._is_first = True

    def connected(self) -> None:
        """Forgets all orders. The next one is obeyed at once: no request is here, and the next may need an adapter."""
        self._order = self._next = None
        self._is_first = True

    def take(self, order: SetAdapters) -> list[AnyMessage]:
        """Takes an order. Returns messages to the router, as `go_on` does."""
        self._next = order
        is_first, self._is_first = self._is_first, False
        answers = self.go_on()
        while is_first and self._writing:
            wait_for([self._writing[1]])
            answers += self.go_on()
        if is_first and any(isinstance(each, AdaptersSet) and each.reason for each in answers):
            raise RuntimeError(f"an adapter of this system can't be loaded: {answers}")
        return answers

    def go_on(self) -> list[AnyMessage]:
        """Continues with what is loaded by now. Called between iterations."""
        if self._writing:
            if not self._writing[1].done():
                return []
            if reason := self._written():
                return self._answered(reason)
        if self._next is not None:
            self._order, self._next = self._next, None
        if self._order is None:
            return []
        self._remove_unwanted(self._order)
        missing = [each for each in self._order.adapters if each.adapter not in self._places.numbers]
        if not missing:
            return self._answered("")
        future = self._thread.submit(self._places.write, missing[0].adapter, Path(missing[0].path))
        self._writing = missing[0], future
        future.add_done_callback(lambda _: self._wake())
        return []

    def close(self) -> None:
        """Ends the thread. Safe to repeat."""
        self._thread.shutdown()

    def _written(self) -> str:
        """Lets requests use the adapter that was written. Returns why it could not be; empty if it was."""
        assert self._writing
        (adapter, future), self._writing = self._writing, None
        try:
            self._places.set(adapter.adapter, future.result())
        except InvalidRequest as error:
            return str(error)
        except Exception as error:
            # Most often there is no memory. No row uses the place, so requests are not affected.
            logger.exception("An adapter can't be loaded")
            return f"{type(error).__name__}: {error}"
        return ""

    def _answered(self, reason: str) -> list[AnyMessage]:
        order, self._order = self._order, None
        answer: list[AnyMessage] = [AdaptersSet(order.number, reason)] if order else []
        return answer + (self.go_on() if self._next else [])

    def _remove_unwanted(self, order: SetAdapters) -> None:
        wanted = {each.adapter for each in order.adapters}
        for name in [name for name in self._places.numbers if name not in wanted]:
            self._places.remove(name)
