"""Carries out episodes: signals processes, and waits until the system has recovered."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Collection
from typing import Any

import httpx2

from benchmarks.soak.plan import Episode, Strike
from benchmarks.soak.victims import Process, processes_of

# Longer than the launcher waits for a process before it gives up.
WHOLE_S = 240.0
_VICTIM_S = 60.0
_LOOK_S, _WATCH_S = 0.05, 0.1


class NotWhole(Exception):
    """The server has ended, or does not recover."""


class Striker:
    def __init__(self, launcher: int, url: str, instance_ids: Collection[str]) -> None:
        self._launcher = launcher
        self._http = httpx2.AsyncClient(base_url=url, timeout=10.0, limits=httpx2.Limits(max_connections=4))
        self._instance_ids = set(instance_ids)
        self._killed: set[Process] = set()
        self._stopped: set[Process] = set()

    async def close(self) -> None:
        """Resumes all stopped processes and closes."""
        for process in self._stopped:
            process.signal(signal.SIGCONT)
        await self._http.aclose()

    async def carry_out(self, episode: Episode) -> None:
        """Returns when the system has recovered. Raises NotWhole."""
        await asyncio.gather(*map(self._strike, episode.strikes))
        await self._until_whole()

    async def _strike(self, strike: Strike) -> None:
        await asyncio.sleep(strike.delay_s)
        process = await self._victim(strike)
        if process is None:
            return
        if strike.stop_s is None:
            self._killed.add(process)
            process.signal(signal.SIGKILL)
            return
        self._stopped.add(process)
        process.signal(signal.SIGSTOP)
        # Does not wait for a process that was killed meanwhile.
        give_up_s = time.monotonic() + strike.stop_s
        while time.monotonic() < give_up_s and process.is_alive:
            await asyncio.sleep(_LOOK_S)
        process.signal(signal.SIGCONT)
        self._stopped.discard(process)

    async def _victim(self, strike: Strike) -> Process | None:
        """Returns a process as soon as there is one; None if there is none for a long time."""
        give_up_s = time.monotonic() + _VICTIM_S
        while time.monotonic() < give_up_s:
            found = [
                each
                for each in processes_of(self._launcher)
                if each.role == strike.role and each not in self._killed
            ]
            if found:
                return found[strike.index % len(found)]
            await asyncio.sleep(_LOOK_S)
        return None

    async def _until_whole(self) -> None:
        give_up_s = time.monotonic() + WHOLE_S
        while missing := await self.missing():
            if time.monotonic() > give_up_s:
                raise NotWhole(f"not whole after {WHOLE_S:g} s: {missing}")
            await asyncio.sleep(_WATCH_S)

    async def missing(self) -> str:
        """Returns what prevents the system from being whole; empty if nothing does. Raises NotWhole if the launcher has
        ended."""
        processes = processes_of(self._launcher)
        if not processes:
            raise NotWhole("the server has ended")
        if not any(each.role == "store" and each not in self._killed for each in processes):
            return "there is no store"
        try:
            return self._of_cluster(await self._json("/v1/cluster")) or self._of_health(
                await self._json("/health"), await self._http.get("/v1/files", params={"limit": 1})
            )
        except (httpx2.HTTPError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    def _of_cluster(self, cluster: dict[str, Any]) -> str:
        rows = cluster.get("processes", [])
        up = {each["instance_id"]: each["pid"] for each in rows if each["state"] == "up"}
        dead = {each.pid for each in self._killed} & set(up.values())
        if up.keys() != self._instance_ids or dead:
            return f"up are {sorted(up)}, of which killed: {dead or 'none'}"
        return ""

    @staticmethod
    def _of_health(health: dict[str, Any], files: httpx2.Response) -> str:
        if health.get("status") != "ok":
            return f"/health says {health}"
        return "" if files.status_code == 200 else f"/v1/files answers {files.status_code}"

    async def _json(self, path: str) -> dict[str, Any]:
        return (await self._http.get(path)).json()  # type: ignore[no-any-return]
