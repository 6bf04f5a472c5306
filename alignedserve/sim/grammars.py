"""Grammars that do not constrain tokens, and take a while to compile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, cast

from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.text.grammar import Matcher

# Seconds to compile a schema of usual size.
COMPILE_S = 0.05


class SimMatcher:
    def __init__(self) -> None:
        self.is_ready = False

    def prepare(self) -> None:
        self.is_ready = True


class SimGrammars:
    def matcher(self, structure: StructuredOutputsParams, owner: str) -> Matcher:
        # An instance calls no other method of a matcher.
        return cast(Matcher, SimMatcher())


class SimThreads(Executor):
    """Threads that finish any task after the same time."""

    def __init__(self, after: Callable[[float, Callable[[], None]], object]) -> None:
        self._after = after

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(fn(*args, **kwargs))

        self._after(COMPILE_S, run)
        return future
