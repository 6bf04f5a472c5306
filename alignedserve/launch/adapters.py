"""The adapters of the system. The launcher owns the list: it outlives every router, instance and gateway.

To load one, its two files are copied to a private directory, so that all instances load the same, now and later. Then
all instances load it, and then all gateways list it. To unload one, gateways stop listing it first. Routers let the
requests that use it finish. Whatever connects is told the whole list.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from alignedserve.batch.placed_inputs import opened
from alignedserve.engine.config import EngineConfig
from alignedserve.engine.lora_modules import adapter_id
from alignedserve.protocol.messages import (
    AdapterAt,
    AdaptersChanged,
    AdaptersSet,
    ChangeAdapters,
    ServedAdapters,
    SetAdapters,
)
from alignedserve.types import InstanceId

logger = logging.getLogger(__name__)

# An adapter's files, as `models/lora.py` reads them, and their largest sizes in bytes.
FILES = {"adapter_config.json": 1 << 20, "adapter_model.safetensors": 4 << 30}
_PIECE_BYTES = 8 << 20

Who = TypeVar("Who")


class Refused(Exception):
    """A change is refused, with the status of the HTTP response. Everything is as before."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Answers(Generic[Who]):
    """The answers to one order, of all that are connected."""

    def __init__(self) -> None:
        self.present: set[Who] = set()
        self._number = 0
        self._waits_for: set[Who] = set()
        self._reason = ""
        self._changed = asyncio.Event()

    def begin(self, number: int) -> None:
        self._number, self._waits_for, self._reason = number, set(self.present), ""

    def answered(self, who: Who, number: int, reason: str = "") -> None:
        if number == self._number and who in self._waits_for:
            self._end(who, reason)

    def lost(self, who: Who, reason: str = "") -> None:
        self.present.discard(who)
        if who in self._waits_for:
            self._end(who, reason)

    async def until_complete(self) -> str:
        """Returns why one of them could not obey; empty if all have."""
        while self._waits_for:
            self._changed.clear()
            await self._changed.wait()
        return self._reason

    def _end(self, who: Who, reason: str) -> None:
        self._waits_for.discard(who)
        self._reason = self._reason or reason
        self._changed.set()


class AdapterKeeper:
    def __init__(
        self,
        engine: EngineConfig,
        allowed: Sequence[str],
        directory: Path,
        tell_routers: Callable[[SetAdapters], None],
        tell_gateways: Callable[[ServedAdapters], None],
    ) -> None:
        """`allowed`: adapters are loaded from below these directories. `directory` is private, and receives copies."""
        self._max_loras = max(engine.max_loras, len(engine.adapters)) if engine.max_loras else 0
        self._allowed = allowed
        self._directory = directory
        self._tell_routers = tell_routers
        self._tell_gateways = tell_gateways
        # By the names that clients use.
        self._listed = {module.name: AdapterAt(module.name, module.path) for module in engine.adapters}
        # What instances should have; during a change more than what is listed.
        self._ordered = list(self._listed.values())
        self._number = 1
        self._changing = asyncio.Lock()
        self.routers = Answers[str]()
        self.gateways = Answers[InstanceId]()
        # Unlisted adapters that requests still use, by island.
        self._kept: dict[str, list[str]] = {}
        self._tidying: set[asyncio.Task[None]] = set()

    # ---- for the connections ----

    @property
    def order(self) -> SetAdapters | None:
        """The order to routers; None: instances have the adapters with which they start, and no others."""
        return SetAdapters(self._number, self._ordered) if self._max_loras else None

    @property
    def served(self) -> ServedAdapters:
        return ServedAdapters(self._number, {name: each.adapter for name, each in self._listed.items()})

    def obeyed(self, island: str, answer: AdaptersSet) -> None:
        """Takes a router's answer."""
        self._kept[island] = answer.kept
        self.routers.answered(island, answer.number, answer.reason)
        task = asyncio.create_task(self._tidy())
        self._tidying.add(task)
        task.add_done_callback(self._tidying.discard)

    def lost(self, island: str) -> None:
        """The connection to a router is lost. Safe to repeat."""
        self._kept.pop(island, None)
        self.routers.lost(island, "the router was lost; try again")

    async def change(self, asked: ChangeAdapters) -> AdaptersChanged:
        """Makes a change. Changes are made one after the other."""
        async with self._changing:
            try:
                if asked.path is None:
                    await self._unload(asked.name)
                else:
                    await self._load(asked.name, asked.path, asked.is_in_place)
            except Refused as refused:
                return AdaptersChanged(asked.ticket, refused.status, str(refused))
            except Exception as error:
                logger.exception("A change of adapters failed")
                reason = getattr(error, "strerror", None) or type(error).__name__
                return AdaptersChanged(
                    asked.ticket, 500, f"the launcher could not make this change: {reason}"
                )
            finally:
                await self._remove_copies()
        return AdaptersChanged(asked.ticket, 200)

    async def _tidy(self) -> None:
        async with self._changing:
            await self._remove_copies()

    # ---- changes ----

    async def _load(self, name: str, path: str, is_in_place: bool) -> None:
        if not self._max_loras:
            raise Refused(400, "adapters are loaded while the server runs only with --max-loras")
        if name in self._listed and not is_in_place:
            raise Refused(
                400,
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
            )
        if len(self._listed.keys() | {name}) > self._max_loras:
            raise Refused(400, f"max_loras={self._max_loras} adapters are loaded; unload one first")
        found = await asyncio.to_thread(self._copied, name, path)
        if self._listed.get(name) == found:
            return
        # Those that it replaces stay until all gateways know it.
        if reason := await self._order([*self._listed.values(), found]):
            await self._order(list(self._listed.values()))
            raise Refused(400, f"lora_path: {reason.replace(found.path, path)}")
        self._listed[name] = found
        await self._serve()
        await self._order(list(self._listed.values()))

    async def _unload(self, name: str) -> None:
        if name not in self._listed or not self._max_loras:
            raise Refused(404, f"The lora adapter '{name}' cannot be found.")
        del self._listed[name]
        await self._serve()
        await self._order(list(self._listed.values()))

    async def _order(self, adapters: list[AdapterAt]) -> str:
        """Returns when all routers have answered, and why one of them could not obey; empty if all have."""
        if adapters == self._ordered:
            return ""
        if not self.routers.present:
            self._ordered = adapters
            return "no router is up"
        self._number += 1
        self._ordered = adapters
        self.routers.begin(self._number)
        self._tell_routers(SetAdapters(self._number, adapters))
        return await self.routers.until_complete()

    async def _serve(self) -> None:
        """Returns when all gateways serve what is listed. One that connects later is told before it accepts clients."""
        self._number += 1
        self.gateways.begin(self._number)
        self._tell_gateways(self.served)
        await self.gateways.until_complete()

    # ---- files ----

    def _copied(self, name: str, path: str) -> AdapterAt:
        """Copies an adapter's files. Raises Refused, and OSError if they can't be written."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        copy = Path(tempfile.mkdtemp(dir=self._directory))
        try:
            digest = hashlib.sha256()
            for file, max_bytes in FILES.items():
                digest.update(self._copy(Path(path) / file, copy / file, max_bytes))
            whole = self._directory / digest.hexdigest()
            if not whole.exists():
                copy.rename(whole)
            return AdapterAt(adapter_id(name, digest.hexdigest()), str(whole))
        finally:
            shutil.rmtree(copy, ignore_errors=True)

    def _copy(self, path: Path, to: Path, max_bytes: int) -> bytes:
        """Copies a file, and returns its digest."""
        digest, num_bytes = hashlib.sha256(), 0
        with open(self._opened(path), "rb") as source, open(to, "xb") as target:
            while piece := source.read(_PIECE_BYTES):
                num_bytes += len(piece)
                if num_bytes > max_bytes:
                    raise Refused(400, f"lora_path: {path.name} has more than {max_bytes} bytes")
                digest.update(piece)
                target.write(piece)
        return digest.digest()

    def _opened(self, path: Path) -> int:
        """Opens a file below a directory that is allowed. Raises Refused."""
        asked = f"lora_path={str(path.parent)!r}"
        try:
            real = Path(os.path.realpath(path))
        except ValueError as error:
            # The path has a zero.
            raise Refused(400, f"{asked}: can't be read: {error}") from None
        roots = [Path(os.path.realpath(each)) for each in self._allowed]
        root = next((each for each in roots if path.is_absolute() and real.is_relative_to(each)), None)
        if root is None:
            allowed = ", ".join(self._allowed) or "no directory: see --lora-modules-from"
            raise Refused(400, f"{asked}: adapters are loaded only from below {allowed}")
        try:
            return opened(root, real)
        except FileNotFoundError:
            raise Refused(404, f"No adapter found for '{path.parent}': it has no {path.name}") from None
        except OSError as error:
            raise Refused(400, f"{asked}: can't be read: {error.strerror}") from None

    async def _remove_copies(self) -> None:
        """Removes the copies that no instance will load any more."""
        kept = {adapter for each in self._kept.values() for adapter in each}
        digests = {adapter.partition("\n")[2] for adapter in kept}
        used = digests | {Path(each.path).name for each in self._ordered}
        await asyncio.to_thread(_remove_others, self._directory, used)


def _remove_others(directory: Path, names: Collection[str]) -> None:
    for copy in directory.glob("?" * 64):
        if copy.name not in names:
            shutil.rmtree(copy, ignore_errors=True)
