"""All islands: a request goes to the one with the fewest open requests; those of an island that is lost go to the
others."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from alignedserve.gateway.island import Island, News
from alignedserve.gateway.telemetry.telemetry import Telemetry
from alignedserve.lengths.prediction import Prediction
from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.messages import Cluster, Request
from alignedserve.types import InstanceId, RequestKey

# So many requests are closed in one turn of the event loop.
NUM_CLOSED_AT_ONCE = 32


class Islands:
    def __init__(
        self,
        routers: Sequence[RouterAddress],
        me: InstanceId,
        fingerprint: Mapping[str, str],
        telemetry: Telemetry,
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_drain` is called when the launcher orders the gateway to accept no new requests."""
        self._telemetry = telemetry
        self._islands = [Island(router, me, fingerprint, self._rescue, on_drain) for router in routers]
        # The best-effort call which is opening its requests holds this.
        self._best_effort = asyncio.Lock()
        self._closing: deque[RequestKey] = deque()

    async def run(self) -> None:
        """Runs until all routers have sent Stop."""
        await asyncio.gather(*(island.run() for island in self._islands))

    @property
    def num_open(self) -> int:
        return sum(island.num_open for island in self._islands)

    def stop(self) -> None:
        for island in self._islands:
            island.stop()

    @contextlib.asynccontextmanager
    async def opening(self, tier: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Yields what a call awaits before it opens the next few of its requests, so that other calls have their turn.
        Best-effort calls open theirs one after the other, and go on when the router has accepted those that were
        opened before."""
        if tier == "rt":
            yield lambda: asyncio.sleep(0)
            return
        async with self._best_effort:
            yield self._until_room

    async def _until_room(self) -> None:
        await asyncio.sleep(0)
        while not (island := self._best(self._islands)).has_room:
            await island.until_changed()

    def open(
        self, request: Request, tell: Callable[[News], None], prediction: Prediction | None = None
    ) -> None:
        """Opens the request at the island with the fewest open ones (Island.open). `prediction` is that of its
        length."""
        self._best(self._islands).open(request, tell, self._telemetry.opened(request, prediction))

    def close(self, key: RequestKey, reason: str = "abort") -> None:
        """Ends a request which no client waits for any more: the client has gone, or (`stop`) has all it wants. Safe
        to repeat."""
        for island in self._islands:
            island.close(key, reason)

    def close_all(self, keys: Sequence[RequestKey]) -> None:
        """Closes requests some at a time, so that other requests do not wait while thousands are closed."""
        if not self._closing and len(keys) <= NUM_CLOSED_AT_ONCE:
            for key in keys:
                self.close(key)
        elif keys:
            if not self._closing:
                asyncio.get_running_loop().call_soon(self._close_some)
            self._closing.extend(keys)

    def _close_some(self) -> None:
        for _ in range(min(NUM_CLOSED_AT_ONCE, len(self._closing))):
            self.close(self._closing.popleft())
        if self._closing:
            asyncio.get_running_loop().call_soon(self._close_some)

    async def cluster(self) -> dict[int, Cluster]:
        """Returns the answer of each router by the island's number. Raises ApiError when none answers."""
        answers = await asyncio.gather(
            *(island.cluster() for island in self._islands), return_exceptions=True
        )
        clusters = {number: answer for number, answer in enumerate(answers) if isinstance(answer, Cluster)}
        for answer in answers:
            if isinstance(answer, BaseException) and not clusters:
                raise answer
        return clusters

    def _rescue(self, lost: Island) -> None:
        others = [island for island in self._islands if island is not lost and island.is_up]
        if others:
            for entry in lost.take_all():
                self._best(others).adopt(entry)

    @staticmethod
    def _best(islands: Sequence[Island]) -> Island:
        return min(islands, key=lambda island: (not island.is_up, island.is_given_up, island.num_open))
