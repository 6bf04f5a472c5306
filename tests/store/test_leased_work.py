"""What happens to a lease when its work ends, fails or is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from alignedserve.store import Lease, LeaseLost, LeaseState, StoreAway
from alignedserve.store.leased_work import ForLease, LeasedWork

LEASES = [Lease(f"batch_{number}", f"{number}:me") for number in range(4)]


class Script:
    """The work of some leases, what was released, and what is over."""

    def __init__(self, released: Callable[[Lease], None] = lambda _: None) -> None:
        self.released: list[Lease] = []
        self.over: list[Lease] = []
        self._and_then = released
        self.leased = LeasedWork(self._release, self.over.append, "job")

    async def _release(self, lease: Lease) -> None:
        self.released.append(lease)
        self._and_then(lease)

    async def begin(self, work: ForLease, leases: Sequence[Lease] = LEASES) -> None:
        for lease in leases:
            self.leased.begin(lease, work)
        # The work begins.
        await asyncio.sleep(0)


async def lasting(lease: Lease) -> None:
    await asyncio.get_running_loop().create_future()


def raising(error: Exception) -> ForLease:
    async def work(lease: Lease) -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "is_logged"),
    [
        (RuntimeError("a fault"), True),
        (LeaseLost(), False),
        (ExceptionGroup("lines", [ExceptionGroup("of it", [LeaseLost()])]), False),
    ],
)
def test_a_lease_whose_work_fails_expires(
    error: Exception, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        script = Script()
        await script.begin(raising(error), LEASES[:1])
        await asyncio.wait(script.leased.tasks.values())
        await asyncio.sleep(0)
        assert (script.released, script.over, script.leased.tasks) == ([], LEASES[:1], {})
        assert ("job batch_0 failed, and is tried again" in caplog.text) == is_logged

    asyncio.run(scenario())


def test_work_that_is_cancelled_releases_its_leases_also_from_a_store_that_is_away() -> None:
    def away(lease: Lease) -> None:
        raise StoreAway("it does not answer")

    async def scenario() -> None:
        script = Script(away)
        await script.begin(lasting)
        await script.leased.cancel()
        assert (script.released, script.over, script.leased.tasks) == (LEASES, LEASES, {})

    asyncio.run(scenario())


def test_a_lost_lease_ends_its_work_and_work_may_end_during_a_renewal() -> None:
    ending = asyncio.Event()

    async def until_then(lease: Lease) -> None:
        await (ending.wait() if lease in LEASES[2:] else lasting(lease))

    async def scenario() -> None:
        script = Script()
        await script.begin(until_then)

        async def renew(leases: Sequence[Lease], seconds: float) -> list[LeaseState]:
            assert (leases, seconds) == (LEASES, 5)
            ending.set()
            while len(script.over) < 2:
                await asyncio.sleep(0)
            return ["lost", "cancelling", "lost", "cancelling"]

        assert await script.leased.renew(renew, 5) == [LEASES[1]]
        while len(script.over) < 3:
            await asyncio.sleep(0)
        assert script.released == LEASES[:1] and list(script.leased.tasks) == [LEASES[1]]
        await script.leased.cancel()

    asyncio.run(scenario())
