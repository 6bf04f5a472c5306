"""Reads the API keys again when their file changes, so that a new key works and a revoked one is refused without a
restart."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from alignedserve.gateway.config import KeyConfig
from alignedserve.gateway.http.keys import owners_of

logger = logging.getLogger(__name__)

# The seconds between two reads of the file. Contents are compared, because times of files are too coarse.
LOOK_S = 1.0
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
        self._owners = dict(owners)
        self._say = say
        self._changed = changed
        self._clock = clock
        # The contents of the last file that could be used, and its owners.
        self._seen: bytes | None = None
        self._found: dict[bytes, str] = {}
        # The contents at the last look.
        self._last: bytes | None = None
        # why the file can't be used, and when that was last printed
        self._problem = ""
        self._printed_s = 0.0

    async def watch(self) -> None:
        """Runs until it is cancelled. Returns at once if there is no file."""
        while self._config.api_key_file is not None:
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
            owners = await asyncio.to_thread(self._read)
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

    def _complain(self, problem: str) -> None:
        """Prints the problem if it is new, or was printed long ago."""
        now_s = self._clock()
        if problem != self._problem or now_s - self._printed_s >= REPEAT_S:
            self._problem, self._printed_s = problem, now_s
            self._say(f"the API keys stay as they are: {problem}")

    def _read(self) -> dict[bytes, str] | None:
        """Returns the owners; None if the file may be half written: the same contents have to be there at two looks in
        a row, or a key that is cut short would count. Raises ValueError."""
        assert self._config.api_key_file is not None
        try:
            seen = Path(self._config.api_key_file).read_bytes()
        except OSError:
            # owners_of names the reason
            seen = None
        before, self._last = self._last, seen
        if seen is not None and seen == self._seen:
            return self._found
        if seen is not None and seen != before:
            return None
        owners = owners_of(self._config.api_key, self._config.api_key_file)
        if seen is None or Path(self._config.api_key_file).read_bytes() != seen:
            return None
        self._seen, self._found = seen, owners
        return owners


def _difference(before: Mapping[bytes, str], after: Mapping[bytes, str]) -> str:
    num_moved = sum(before[digest] != after[digest] for digest in before.keys() & after.keys())
    moved = f", {num_moved} in another group" if num_moved else ""
    return (
        f"{len(after.keys() - before.keys())} added, {len(before.keys() - after.keys())} removed{moved}; "
        f"{len(after)} in all"
    )
