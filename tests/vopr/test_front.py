"""The real gateways, batch jobs and routers in virtual time: what holds whatever dies, and every run again."""

from __future__ import annotations

import asyncio
from random import Random

from alignedserve.batch.config import BatchConfig
from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.island import IslandConfig
from alignedserve.vopr.front import Front, FrontConfig
from alignedserve.vopr.words import Question
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
