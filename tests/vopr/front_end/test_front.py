"""The real gateways, batch jobs and routers in virtual time: what holds whatever dies, and every run again."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from random import Random

import pytest

from alignedserve.batch.config import BatchConfig
from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.island import IslandConfig
from alignedserve.vopr.front_end.front import Front, FrontConfig
from alignedserve.vopr.front_end.virtual_gateway import VirtualGateway
from alignedserve.vopr.front_end.words import Question
from tests.sim.islands import COST, limits

ISLAND = IslandConfig(
    cost=COST,
    prefill=limits(),
    decode=limits(),
    pool_blocks=256,
    num_gateways=0,
    router=RouterConfig(link="host"),
    scheduling=SchedulingConfig("aligned", min_batch_requests=4),
)

# The seconds of virtual time within which everything has to be answered, whatever went wrong in the first minute.
LIMIT_S = 600.0


def front(seed: int, num_islands: int = 1, keeps_lines: bool = False) -> Front:
    config = FrontConfig(ISLAND, num_islands, batches=BatchConfig(max_num_lines=8))
    return Front(config, seed, keeps_lines)


def questions(random: Random, count: int, max_model_len: int, start: int = 0) -> list[Question]:
    return [
        Question.of(start + number, random.randint(1, 200), random.randint(1, 40), max_model_len)
        for number in range(count)
    ]


async def all_over(system: Front) -> None:
    """Waits for clients, and then for what lasts a while after them."""
    while system.clients.num_waiting:
        await asyncio.sleep(1)
        system.check()
    await asyncio.sleep(60)
    system.check_idle()


def test_chats_and_jobs_are_answered_where_nothing_goes_wrong() -> None:
    async def drive(system: Front) -> None:
        asked = questions(system.random, 30, system.max_model_len)
        async with asyncio.TaskGroup() as group:
            group.create_task(system.clients.batch(0, asked[:20]))
            for number, question in enumerate(asked[20:]):
                group.create_task(system.clients.chat(number, question))
        await all_over(system)

    system = front(1)
    system.run(drive)
    assert system.clients.outcomes["answered"] == 10 and system.clients.outcomes["line"] == 20


class Troubles:
    """What goes wrong, one thing after the other, and several at once."""

    def __init__(self, system: Front) -> None:
        self.system = system
        self.random = system.random
        self.counts: Counter[str] = Counter()
        self._healing: set[asyncio.Task[None]] = set()

    async def make(self, seconds: float) -> None:
        """Makes trouble for so many seconds, and returns when all of it is over."""
        kinds = (self.kill_gateway, self.stop_gateway, self.hang_gateway, self.set_clock, self.kill_router)
        kinds += (self.kill_instance, self.disturb_connection, self.lose_store, self.lose_answers)
        until_s = self.system.loop.time() + seconds
        while self.system.loop.time() < until_s:
            await asyncio.sleep(self.random.expovariate(0.5))
            kind = self.random.choice(kinds)
            self.counts[kind.__name__] += 1
            self.system.history.add("trouble", kind.__name__)
            task = asyncio.create_task(kind())
            self._healing.add(task)
            task.add_done_callback(self._healing.discard)
            self.system.check()
        if self._healing:
            done, _ = await asyncio.wait(self._healing)
            for task in done:
                task.result()
        for gateway in self.system.gateways:
            if not gateway.is_up:
                gateway.start()
            elif gateway.process:
                gateway.process.wall_ahead_s = 0.0

    async def a_while(self) -> None:
        await asyncio.sleep(self.random.choice((0.0, 0.001, 0.1, 3.0, 15.0)) * self.random.random())

    def gateway(self) -> VirtualGateway:
        return self.random.choice(self.system.gateways)

    async def kill_gateway(self) -> None:
        gateway = self.gateway()
        gateway.kill()
        await self.a_while()
        if not gateway.is_up:
            gateway.start()

    async def stop_gateway(self) -> None:
        gateway = self.gateway()
        if gateway.process and gateway.is_up:
            gateway.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(40)
        if not gateway.is_up:
            gateway.start()

    async def hang_gateway(self) -> None:
        if process := self.gateway().process:
            process.hang()
            await asyncio.sleep(self.random.uniform(0, 20))
            process.wake_up()

    async def set_clock(self) -> None:
        if process := self.gateway().process:
            process.wall_ahead_s = self.random.uniform(-3600, 3600)

    async def kill_router(self) -> None:
        router = self.random.choice(self.system.islands).router
        if router.is_up:
            router.kill()
            await self.a_while()
            router.start()

    async def kill_instance(self) -> None:
        process = self.random.choice([each for island in self.system.islands for each in island.processes])
        if process.is_up:
            process.kill()
            await self.a_while()
            process.start()

    async def disturb_connection(self) -> None:
        if connections := list(self.system.loop.network.connections.values()):
            connection = self.random.choice(connections)
            match self.random.randrange(4):
                case 0:
                    connection.cut()
                case 1:
                    connection.stall(self.random.uniform(0, 20))
                case 2:
                    connection.half_open(self.random.choice((connection.client, connection.server)))
                case 3:
                    connection.vanish()

    async def lose_store(self) -> None:
        faults = self.system.store_faults
        faults.is_away = True
        await self.a_while()
        faults.is_away = False

    async def lose_answers(self) -> None:
        faults = self.system.store_faults
        faults.loses_answer = lambda: self.random.random() < 0.3
        await self.a_while()
        faults.loses_answer = lambda: False


def troubled(seed: int, keeps_lines: bool = False) -> tuple[Front, Troubles, str]:
    random = Random(seed)
    system = front(seed, num_islands=random.choice((1, 1, 2)), keeps_lines=keeps_lines)
    system.loop.network.latency = lambda: random.expovariate(1000)
    system.loop.network.piece_bytes = lambda: random.choice((1, 50, 1000, 100_000))
    troubles = Troubles(system)

    async def drive(system: Front) -> None:
        asked = questions(random, 100, system.max_model_len)
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            trouble = group.create_task(troubles.make(60))
            for number in range(3):
                group.create_task(system.clients.batch(number, asked[20 * number : 20 * number + 20]))
            for number, question in enumerate(asked[60:]):
                leaves_after = random.choice((None, None, None, random.randrange(20)))
                group.create_task(system.clients.chat(number, question, leaves_after))
                await asyncio.sleep(random.expovariate(1))
            await trouble
        await all_over(system)

    return system, troubles, system.run(drive)


@pytest.mark.parametrize("seed", range(1, 5))
def test_whatever_dies_all_is_answered_and_nothing_is_left(seed: int) -> None:
    system, troubles, _ = troubled(seed)
    assert system.clients.outcomes["answered"] >= 20
    assert system.clients.outcomes["line"] + system.clients.outcomes["line_failed"] == 60
    assert troubles.counts.total() > 5


def test_a_seed_has_one_history() -> None:
    (first, _, digest), (second, _, again) = (troubled(7, keeps_lines=True) for _ in range(2))
    assert first.history.lines == second.history.lines and digest == again
    assert troubled(8)[2] != digest
