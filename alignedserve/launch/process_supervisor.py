"""Keeps one process of the system running. It starts the actor, runs it again when it died, and gives up after too many
deaths.

Ray restarts a dead actor (max_restarts=-1), and reports that `run` ended, and how. The router reports whether the
process works: a process is up while it is connected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    RayError,
    RayTaskError,
)

from alignedserve.launch.console import Alarm
from alignedserve.launch.control import RestartFailed
from alignedserve.process import HANG_S

# seconds that a process gets to be up again, or three times the time of its first start, if that is more
RESTART_S = 60.0
# the most deaths in a row without being up
MAX_DEATHS = 4
_RETRY_S = 0.2


class ProcessFailed(RuntimeError):
    """A process can't be started, or started again."""


class Actor(Protocol):
    async def ready(self) -> None:
        """Returns when the process exists. Raises RayError."""

    async def run(self) -> None:
        """Returns when the process has stopped after an order. Raises RayError."""

    async def why_ended(self) -> str | None:
        """Returns how the last process ended, such as its signal; None if that is not known."""

    def restart(self) -> None:
        """Kills the process. Ray starts another one."""

    def kill(self) -> None:
        """Kills the process for good. Safe to repeat."""

    async def prepare(self) -> None:
        """Returns when the process has imported and loaded what it can before it serves. Raises RayError."""

    def successor(self) -> Actor | None:
        """Returns another actor that can take this one's place; None if both can't exist at once."""


class ProcessSupervisor:
    def __init__(self, name: str, actor: Actor, say: Callable[[str], None]) -> None:
        self.name = name
        self._actor = actor
        self._say = say
        self._is_stopping = False
        self._is_up = asyncio.Event()
        self._is_down = asyncio.Event()
        self._ended = asyncio.Event()
        self._seen_by: set[str] = set()
        self._was_up = False
        # whether "is down" was printed
        self._is_missed = False
        self._num_runs = 0
        self._num_deaths = 0
        # why the process ended before, if that is known, and whether this supervisor causes its next end
        self._reason = ""
        self._is_restarting = False
        # whether the process is being replaced; whether it was killed for that and its successor has not taken its
        # place yet; set once it has
        self._is_replacing = False
        self._is_next_awaited = False
        self._replaced = asyncio.Event()
        self._start_s = time.monotonic()
        self._first_took_s = 0.0

    def seen(self, by: str, detail: str) -> None:
        """Notes that a router is connected to the process."""
        self._seen_by.add(by)
        if self._is_up.is_set():
            return
        took_s = time.monotonic() - self._start_s
        if not self._was_up:
            self._first_took_s = took_s
        if self._is_missed or not self._was_up:
            self._say(f"{self.name} is up after {took_s:.1f} s: {detail}")
        self._was_up, self._is_missed, self._num_deaths, self._reason = True, False, 0, ""
        self._is_up.set()
        self._is_down.clear()

    def unseen(self, by: str, is_dead: bool) -> None:
        """Notes that a router is no longer connected to the process. `is_dead` is false if the router itself is
        gone."""
        self._seen_by.discard(by)
        if self._seen_by or not self._is_up.is_set():
            return
        self._is_up.clear()
        self._is_down.set()
        if not self._is_replacing:
            self._start_s = time.monotonic()
        if is_dead and not self._is_stopping:
            self._is_missed = True
            if not self._is_replacing:
                self._say(Alarm(f"{self.name} is down; starting it again"))

    @property
    def is_up(self) -> bool:
        return self._is_up.is_set()

    async def until_up(self) -> None:
        await self._is_up.wait()

    async def until_ended(self) -> None:
        """Returns when `supervise` has returned or failed, or is about to."""
        await self._ended.wait()

    async def until_up_or_ended(self) -> None:
        tasks = [asyncio.create_task(each) for each in (self.until_up(), self.until_ended())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def stopping(self) -> None:
        self._is_stopping = True

    @property
    def actor(self) -> Actor:
        return self._actor

    @property
    def patience_s(self) -> float:
        """seconds that the process gets to be up again"""
        return max(RESTART_S, 3 * self._first_took_s)

    async def successor(self) -> Actor | None:
        """Returns another actor, which is ready to take this one's place; None if both can't exist at once. Raises
        RestartFailed."""
        if (new := self._actor.successor()) is None:
            return None
        try:
            async with asyncio.timeout(self.patience_s):
                await new.prepare()
        except (RayError, TimeoutError) as error:
            new.kill()
            reason = "it takes too long" if isinstance(error, TimeoutError) else _reason(error)
            raise RestartFailed(f"can't start another process for {self.name}: {reason}") from error
        except BaseException:
            new.kill()
            raise
        return new

    def switch(self, actor: Actor) -> None:
        """Supervises this actor from now on, in place of the one before."""
        self._actor = actor
        self._is_next_awaited = False
        self._replaced.set()

    async def replace(self) -> None:
        """Kills the process and puts another in its place. Returns when that is up. Raises RestartFailed. If no other
        process could be prepared, this one goes on."""
        start_s = time.monotonic()
        new = await self.successor()
        if not self._is_up.is_set():
            if new:
                new.kill()
            raise RestartFailed(f"{self.name} is not up")
        self._is_replacing, self._is_next_awaited, self._is_restarting = True, bool(new), not new
        self._start_s = start_s
        try:
            self._actor.kill() if new else self._actor.restart()
            async with asyncio.timeout(self.patience_s):
                # Its connections close when it is dead. Two processes with one name would conflict.
                await self._is_down.wait()
                if new:
                    self.switch(new)
                await self._is_up.wait()
        except TimeoutError:
            raise RestartFailed(f"another process for {self.name} does not come up") from None
        finally:
            if new and self._actor is not new:
                self.switch(new)
            self._is_replacing = False

    async def supervise(self) -> None:
        """Returns when the process has stopped after an order. Raises ProcessFailed."""
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch())
            try:
                await self._run()
            finally:
                self._ended.set()
            watching.cancel()

    async def _run(self) -> None:
        while not self._is_stopping:
            actor = self._actor
            error = await self._run_once(actor)
            if self._is_next_awaited:
                await self._replaced.wait()
            if self._is_stopping:
                return
            if actor is self._actor:
                self._judge(error, await actor.why_ended())
                await asyncio.sleep(_RETRY_S)

    async def _run_once(self, actor: Actor) -> RayError | None:
        """Returns when the process has ended, or another one has taken its place."""
        self._num_runs += 1
        self._replaced.clear()
        running = asyncio.create_task(self._run_actor(actor))
        replaced = asyncio.create_task(self._replaced.wait())
        try:
            await asyncio.wait({running, replaced}, return_when=asyncio.FIRST_COMPLETED)
            return running.result() if running.done() else None
        finally:
            running.cancel()
            replaced.cancel()

    async def _run_actor(self, actor: Actor) -> RayError | None:
        try:
            await self._until_ready(actor)
            await actor.run()
        except RayError as error:
            return error
        return None

    async def _until_ready(self, actor: Actor) -> None:
        """Waits until the actor is ready. Ray reports an actor as unavailable while it has not noticed a death or is
        starting another process. That is not a death, and takes many seconds on a busy machine."""
        give_up_s = time.monotonic() + RESTART_S
        while True:
            try:
                return await actor.ready()
            except ActorUnavailableError:
                if self._is_stopping or time.monotonic() > give_up_s:
                    raise
            await asyncio.sleep(_RETRY_S)

    def _judge(self, error: RayError | None, why: str | None) -> None:
        """`why` is how the process ended, if that is known."""
        was_restarting, self._is_restarting = self._is_restarting, False
        if was_restarting and isinstance(error, ActorUnavailableError):
            return
        self._num_deaths += 1
        reason = f"{_reason(error)}: {why}" if why and not isinstance(error, RayTaskError) else _reason(error)
        if isinstance(error, ActorDiedError | ActorUnschedulableError):
            raise ProcessFailed(f"{self.name} can't be started again: {reason}")
        if isinstance(error, RayTaskError):
            self._reason = reason
            if not self._was_up:
                raise ProcessFailed(f"{self.name}: {reason}")
            self._say(Alarm(f"{self.name} failed: {reason}"))
            self._is_restarting = True
            self._actor.restart()
        else:
            self._say(Alarm(f"{self.name}: {reason}"))
        if self._num_deaths >= MAX_DEATHS:
            raise ProcessFailed(
                f"{self.name} died {self._num_deaths} times in a row: {self._reason or reason}"
            )

    async def _watch(self) -> None:
        """Kills the process when it hangs. Raises ProcessFailed if it was up and does not come back."""
        while True:
            await self._is_down.wait()
            run = self._num_runs
            patience_s = self.patience_s
            if await self._comes_back_within(HANG_S):
                continue
            if run == self._num_runs and self._is_missed and not self._is_replacing:
                self._say(Alarm(f"{self.name} hangs; killing it"))
                self._is_restarting = True
                self._actor.restart()
            if not await self._comes_back_within(patience_s):
                raise ProcessFailed(f"{self.name} did not come back within {HANG_S + patience_s:.0f} s")

    async def _comes_back_within(self, seconds: float) -> bool:
        # Before Python 3.12 wait_for can swallow a cancellation.
        try:
            async with asyncio.timeout(seconds):
                await self._is_up.wait()
        except TimeoutError:
            return False
        return True


def _reason(error: RayError | None) -> str:
    if error is None:
        return "it stopped by itself"
    if isinstance(error, ActorUnavailableError):
        return "its process died"
    cause = error.cause if isinstance(error, RayTaskError) else error
    # The other lines are for Ray's developers.
    return str(cause).strip().split("\n")[0] or type(cause).__name__
