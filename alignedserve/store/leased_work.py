"""Work on what a process has leased: a task for each lease, which ends when the lease is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

from alignedserve.store.homes.base import StoreAway
from alignedserve.store.records import Lease, LeaseLost, LeaseState

log = logging.getLogger(__name__)

ForLease = Callable[[Lease], Awaitable[None]]
Renew = Callable[[Sequence[Lease], float], Awaitable[list[LeaseState]]]


class LeasedWork:
    def __init__(self, release: ForLease, over: Callable[[Lease], None], what: str) -> None:
        """`release` is the store's. `over` is called when a lease's work has ended. `what` is leased, for the log."""
        self._release = release
        self._over = over
        self._what = what
        self.tasks: dict[Lease, asyncio.Task[None]] = {}

    def begin(self, lease: Lease, work: ForLease) -> None:
        self.tasks[lease] = asyncio.create_task(self._run(lease, work))
        self.tasks[lease].add_done_callback(lambda _: self._ended(lease))

    async def renew(self, renew: Renew, seconds: float) -> list[Lease]:
        """Renews all leases by the store's `renew`, and cancels the work of lost ones. While the store is down, no
        other gateway can take them. Returns the leases of jobs that are being cancelled."""
        leases = list(self.tasks)
        states = await renew(leases, seconds)
        held = [each for each in zip(leases, states, strict=True) if each[0] in self.tasks]
        for lease, state in held:
            if state == "lost":
                self.tasks[lease].cancel()
        return [lease for lease, state in held if state == "cancelling"]

    async def cancel(self) -> None:
        """Cancels all work, which releases its leases, and waits for that."""
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def release(self, lease: Lease) -> None:
        with contextlib.suppress(StoreAway):
            await self._release(lease)

    async def _run(self, lease: Lease, work: ForLease) -> None:
        try:
            await work(lease)
        except asyncio.CancelledError:
            await self.release(lease)
            raise
        except Exception as error:
            # The lease is not released: it expires, which delays the next try.
            if not _is_lost(error):
                log.exception("%s %s failed, and is tried again", self._what, lease.id)

    def _ended(self, lease: Lease) -> None:
        del self.tasks[lease]
        self._over(lease)


def _is_lost(error: BaseException) -> bool:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return isinstance(error, LeaseLost)
