"""Compiles requests' grammars on threads, so that no iteration waits for one. llguidance releases the GIL while it
compiles."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from alignedserve.text.grammar import Matcher
from alignedserve.transport.completions import Completions
from alignedserve.types import RequestKey

# With two threads, a slow grammar delays some others, but not all.
NUM_THREADS = 2


@dataclass(eq=False)
class _Job:
    future: Future[None]
    # The call to make when the grammar is ready.
    then: Callable[[], None] | None = None


class Compiling:
    def __init__(self, completions: Completions, threads: Executor | None = None) -> None:
        self._completions = completions
        self._threads = threads or ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._jobs: dict[RequestKey, _Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, key: RequestKey, matcher: Matcher | None) -> None:
        """Starts compiling a request's grammar. Does nothing if there is none or it is ready."""
        if matcher is None or matcher.is_ready:
            return
        job = self._jobs[key] = _Job(self._threads.submit(matcher.prepare))
        job.future.add_done_callback(lambda _: self._completions.call(partial(self._ended, key, job)))

    def when_ready(self, key: RequestKey, then: Callable[[], None]) -> None:
        """Calls `then` when the request's grammar is ready: immediately if it is, otherwise from the completions. Never
        calls it after `drop`."""
        job = self._jobs.get(key)
        if job is None:
            then()
        else:
            job.then = then

    def drop(self, key: RequestKey) -> bool:
        """Forgets a request's grammar. Returns True if this cancels a waiting call. Safe to repeat."""
        job = self._jobs.pop(key, None)
        if job is None:
            return False
        job.future.cancel()
        return job.then is not None

    def close(self) -> None:
        """Ends all threads. Safe to repeat."""
        for key in list(self._jobs):
            self.drop(key)
        self._threads.shutdown()

    def _ended(self, key: RequestKey, job: _Job) -> None:
        if self._jobs.get(key) is not job:
            return
        del self._jobs[key]
        job.future.result()
        if job.then is not None:
            job.then()
