"""All islands. A request goes to the island that suits it best (choice.py). Open requests of a lost island move
to the others.

Islands may be added and removed while the gateway runs (`set`). There is always at least one, though it may be down.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence

from alignedserve.engine.lora_modules import name_of
from alignedserve.gateway.islands.choice import best
from alignedserve.gateway.islands.island import IslandClient
from alignedserve.gateway.islands.output_queue import News, OutputQueue
from alignedserve.gateway.telemetry.telemetry import Telemetry
from alignedserve.lengths.prediction import Prediction
from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.messages import Cluster, Request
from alignedserve.scheduling.prefixes import block_hashes
from alignedserve.types import InstanceId, RequestKey

# number of requests that are closed in one turn of the event loop
NUM_CLOSED_AT_ONCE = 32


class Islands:
    def __init__(
        self,
        routers: Sequence[RouterAddress],
        me: InstanceId,
        fingerprint: Mapping[str, str],
        telemetry: Telemetry,
        on_drain: Callable[[], None] = lambda: None,
        first_number: int = 0,
    ) -> None:
        """`on_drain` is called when the launcher orders the gateway to accept no new requests. `first_number` is the
        number of the first island; the others follow it."""
        self._telemetry = telemetry
        self._me = me
        self._fingerprint = fingerprint
        self._on_drain = on_drain
        self._outputs = OutputQueue()
        # By island number.
        self._islands: dict[int, IslandClient] = {
            number: self._make(router) for number, router in enumerate(routers, first_number)
        }
        # The model's adapters by the names that clients use; they change.
        self.adapters: Mapping[str, str] = {}
        # Messages for people about processes that should run and do not.
        self.missing: Sequence[str] = ()
        # Number of islands that the traffic needs. 0: unknown.
        self.num_wanted = 0
        self._running: dict[asyncio.Task[None], IslandClient] = {}
        # This is set when `run` has something to do.
        self._changed = asyncio.Event()
        self._is_stopped = False
        # Held by the best-effort call that is opening its requests.
        self._best_effort = asyncio.Lock()
        self._closing: deque[RequestKey] = deque()

    async def run(self) -> None:
        """Runs until all routers have sent Stop, or until `stop`. Raises RefusedByRouter."""
        for island in self._islands.values():
            self._start(island)
        try:
            while self._running and not self._is_stopped:
                await self._changed.wait()
                self._changed.clear()
                self._take_ended()
        finally:
            for island in self._running.values():
                island.stop()
            await asyncio.gather(*self._running)

    def set(self, routers: Mapping[int, RouterAddress], leaving: Collection[int] = ()) -> None:
        """Replaces the islands, which are given by number. Open requests of removed islands move to the others and
        continue as soon as those are up. Islands in `leaving` get new requests only if there is no other."""
        if not routers:
            raise ValueError("there must be an island")
        before = self._islands
        self._islands = {
            number: before[number]
            if number in before and before[number].address == router
            else self._make(router)
            for number, router in routers.items()
        }
        here = list(self._islands.values())
        for number, island in self._islands.items():
            island.is_leaving = number in leaving
            if island not in before.values():
                self._start(island)
        for island in before.values():
            if island not in here:
                self._move(island, here)
                island.stop()

    @property
    def num_open(self) -> int:
        return sum(island.num_open for island in self._islands.values())

    def stop(self) -> None:
        self._is_stopped = True
        self._changed.set()

    @contextlib.asynccontextmanager
    async def opening(self, tier: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Yields a function that a call awaits before it opens its next few requests, so that other calls have their
        turn.

        Best-effort calls open their requests one call after another. Each continues when the router has accepted the
        requests that were opened before."""
        if tier == "rt":
            yield lambda: asyncio.sleep(0)
            return
        async with self._best_effort:
            yield self._until_room

    async def _until_room(self) -> None:
        await asyncio.sleep(0)
        while not (island := best(self._islands.values())).has_room:
            await island.until_changed()

    def open(
        self, request: Request, tell: Callable[[News], None], prediction: Prediction | None = None
    ) -> None:
        """Opens the request at an island (IslandClient.open). `prediction` is the predicted length of its answer."""
        islands = self._islands.values()
        has_choice = len(islands) > 1 and any(island.island_load.has_caches for island in islands)
        hashes = block_hashes(request) if has_choice else []
        island = best(islands, request, hashes)
        island.open(request, tell, self._telemetry.opened(request, prediction))
        island.island_load.sent(request, hashes)

    def close(self, key: RequestKey, reason: str = "abort") -> None:
        """Ends a request that no client waits for any more: the client has disconnected, or has all it asked for
        (`reason` is `stop`). Safe to repeat."""
        for island in self._islands.values():
            island.close(key, reason)

    def close_all(self, keys: Sequence[RequestKey]) -> None:
        """Closes requests a few at a time, so that other requests do not wait while thousands are closed."""
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

    async def reset_prefix_cache(self) -> None:
        """Resets the prefix cache of all islands. Raises ApiError if a router does not answer."""
        await asyncio.gather(*(island.reset_prefix_cache() for island in self._islands.values()))

    async def cluster(self) -> dict[int, Cluster]:
        """Returns each router's answer by island number. Raises ApiError if none answers."""
        islands = dict(self._islands)
        answers = await asyncio.gather(
            *(island.cluster() for island in islands.values()), return_exceptions=True
        )
        clusters = {
            number: answer
            for number, answer in zip(islands, answers, strict=True)
            if isinstance(answer, Cluster)
        }
        for answer in answers:
            if isinstance(answer, BaseException) and not clusters:
                raise answer
        return clusters

    def _make(self, router: RouterAddress) -> IslandClient:
        return IslandClient(
            router,
            self._me,
            self._fingerprint,
            self._rescue,
            self._on_drain,
            self._outputs,
            lambda adapter: self.adapters.get(name_of(adapter), adapter),
        )

    def _start(self, island: IslandClient) -> None:
        task = asyncio.create_task(island.run())
        self._running[task] = island
        task.add_done_callback(lambda _: self._changed.set())

    def _take_ended(self) -> None:
        """Removes the tasks that have ended, and raises their errors."""
        for task in [task for task in self._running if task.done()]:
            del self._running[task]
            task.result()

    def _rescue(self, lost: IslandClient) -> None:
        self._move(lost, [island for island in self._islands.values() if island is not lost and island.is_up])

    def _move(self, lost: IslandClient, others: Sequence[IslandClient]) -> None:
        if others:
            for entry in lost.take_all():
                island = best(others, entry.request)
                island.adopt(entry)
                island.island_load.sent(entry.request, [])
