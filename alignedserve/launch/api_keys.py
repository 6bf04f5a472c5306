"""Reads the API keys again when their file changes, so that a new key works and a revoked one is refused without a
restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from alignedserve.gateway.config import KeyConfig
from alignedserve.gateway.http.keys import contents_of, files_of, owners_in
from alignedserve.launch.console import Alarm

_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)

# The seconds between two reads of the file. Contents are compared, because times of files are too coarse.
LOOK_S = 1.0
# The seconds that one read may take before it is reported. On a network's file system it may never end.
READ_S = 5.0
# The seconds after which a problem that persists is printed again.
REPEAT_S = 600.0


class KeyFile:
    def __init__(
        self,
        config: KeyConfig,
        owners: Mapping[bytes, str],
        say: Callable[[str], None],
        changed: Callable[[Mapping[bytes, str]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`owners` are those of owners_of when the system was planned. `changed` is called with each new list."""
        self._config = config
        self._files = files_of(config.api_key_file, config.operator_key_file)
        self._owners = dict(owners)
        self._say = say
        self._changed = changed
        self._clock = clock
        # The contents of the last files that could be used, and their owners.
        self._seen: dict[str, bytes] | None = None
        self._found: dict[bytes, str] = {}
        # The contents at the last look.
        self._last: dict[str, bytes] | None = None
        # a read that has not ended yet
        self._reading: asyncio.Future[dict[bytes, str] | None] | None = None
        # why the file can't be used, and when that was last printed
        self._problem = ""
        self._printed_s = 0.0

    async def watch(self) -> None:
        """Runs until it is cancelled. Returns at once if there is no file."""
        while self._files:
            try:
                await self.look()
            except Exception as error:
                # Without further looks a revoked key would stay valid.
                logger.exception("the file of API keys was not read")
                self._complain(f"{type(error).__name__}: {error}")
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Reads the file. A file that can't be used leaves the list as it is."""
        try:
            owners = await self._read_in_time()
        except (ValueError, OSError) as error:
            self._complain(str(error))
            return
        if owners is None:
            return
        before, is_new = self._owners, owners != self._owners
        if is_new:
            self._changed(owners)
            self._owners = owners
        if self._problem:
            self._problem = ""
            self._say("the file of API keys can be used again")
        if is_new:
            self._say(f"the API keys have changed: {_difference(before, owners)}")

    async def _read_in_time(self) -> dict[bytes, str] | None:
        """Returns what `_read` returns. If that takes too long, raises ValueError, and the next call waits for the same
        read."""
        if self._reading is None:
            self._reading = _in_daemon_thread(self._read)
        await asyncio.wait({self._reading}, timeout=READ_S)
        if not self._reading.done():
            files = ", ".join(f"{option}={path!r}" for option, path in self._files.items())
            raise ValueError(f"{files}: not read within {READ_S:g} s")
        reading, self._reading = self._reading, None
        return reading.result()

    def _complain(self, problem: str) -> None:
        """Prints the problem if it is new, or was printed long ago. It names the flag."""
        for option, path in self._files.items():
            problem = problem.replace(f"{option}={path!r}", f"--{option.replace('_', '-')} {path}")
        now_s = self._clock()
        if problem != self._problem or now_s - self._printed_s >= REPEAT_S:
            self._problem, self._printed_s = problem, now_s
            self._say(Alarm(f"the API keys stay as they are: {problem}"))

    def _read(self) -> dict[bytes, str] | None:
        """Returns the owners; None if the file may be half written: the same contents have to be there at two looks in
        a row, or a key that is cut short would count. Raises ValueError."""
        before, self._last = self._last, None
        self._last = seen = contents_of(self._files)
        if seen == self._seen:
            return self._found
        if seen != before:
            return None
        owners = owners_in(self._config.api_key, self._config.operator_key, self._files, seen)
        self._seen, self._found = seen, owners
        return owners


def _in_daemon_thread(call: Callable[[], _Result]) -> asyncio.Future[_Result]:
    """Starts the call in a thread of its own, for which the end of the process does not wait."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()

    def run() -> None:
        # A loop that is closed needs no result.
        with contextlib.suppress(RuntimeError):
            try:
                result = call()
            except Exception as error:
                loop.call_soon_threadsafe(future.set_exception, error)
            else:
                loop.call_soon_threadsafe(future.set_result, result)

    threading.Thread(target=run, daemon=True).start()
    return future


def _difference(before: Mapping[bytes, str], after: Mapping[bytes, str]) -> str:
    num_moved = sum(before[digest] != after[digest] for digest in before.keys() & after.keys())
    moved = f", {num_moved} in another group" if num_moved else ""
    return (
        f"{len(after.keys() - before.keys())} added, {len(before.keys() - after.keys())} removed{moved}; "
        f"{len(after)} in all"
    )
