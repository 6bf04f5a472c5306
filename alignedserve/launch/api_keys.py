"""Reads the API keys again when their file changes, so that a new key works and a revoked one is refused without a
restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from alignedserve.gateway.config import KeyConfig
from alignedserve.gateway.http.keys import owners_of

# The seconds between two reads of the file. Contents are compared, because times of files are too coarse.
LOOK_S = 1.0


class KeyFile:
    def __init__(
        self,
        config: KeyConfig,
        owners: Mapping[bytes, str],
        say: Callable[[str], None],
        changed: Callable[[Mapping[bytes, str]], None],
    ) -> None:
        """`owners` are those of owners_of when the system was planned. `changed` is called with each new list."""
        self._config = config
        self._owners = dict(owners)
        self._say = say
        self._changed = changed
        # The contents of the list in use, and of the last look.
        self._seen: bytes | None = None
        self._last: bytes | None = None
        # the last printed reason why the file could not be used
        self._problem = ""

    async def watch(self) -> None:
        """Runs until it is cancelled. Returns at once if there is no file."""
        while self._config.api_key_file is not None:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Reads the file. A file that can't be used leaves the list as it is."""
        try:
            owners = await asyncio.to_thread(self._read)
        except (ValueError, OSError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                self._say(f"the API keys stay as they are: {error}")
            return
        self._problem = ""
        if owners is not None and owners != self._owners:
            before, self._owners = self._owners, owners
            self._changed(owners)
            self._say(f"the API keys have changed: {_difference(before, owners)}")

    def _read(self) -> dict[bytes, str] | None:
        """Returns the owners; None if the file has not changed, or may be half written: the same contents have to be
        there at two looks in a row, or a key that is cut short would count. Raises ValueError."""
        assert self._config.api_key_file is not None
        try:
            seen = Path(self._config.api_key_file).read_bytes()
        except OSError:
            # owners_of names the reason
            seen = None
        before, self._last = self._last, seen
        if seen is not None and (seen == self._seen or seen != before):
            return None
        owners = owners_of(self._config.api_key, self._config.api_key_file)
        if seen is None or Path(self._config.api_key_file).read_bytes() != seen:
            return None
        self._seen = seen
        return owners


def _difference(before: Mapping[bytes, str], after: Mapping[bytes, str]) -> str:
    num_moved = sum(before[digest] != after[digest] for digest in before.keys() & after.keys())
    moved = f", {num_moved} in another group" if num_moved else ""
    return (
        f"{len(after.keys() - before.keys())} added, {len(before.keys() - after.keys())} removed{moved}; "
        f"{len(after)} in all"
    )
