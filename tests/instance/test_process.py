"""Instances as real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from alignedserve.protocol.messages import Prefill, Stop
from alignedserve.types import Epoch, InstanceId
from tests.engine.helpers import greedy_params
from tests.instance.remote import DECODE, PREFILL, RemoteIsland
from tests.tiny_models import greedy, prompts

Directory = Callable[[str], Path]
FAMILY = "llama-gqa-tied"


def submit_all(island: RemoteIsland) -> None:
    for prompt in prompts():
        island.rules.submit(prompt, greedy_params())
    island.order()


def outputs(island: RemoteIsland) -> list[list[int]]:
    return [entry.output for entry in island.rules.entries.values()]


def num_tokens(island: RemoteIsland) -> int:
    return sum(map(len, outputs(island)))


@pytest.mark.slow
def test_two_processes_and_evictions(tiny_model: Directory) -> None:
    async def run() -> None:
        async with RemoteIsland(tiny_model(FAMILY)) as island:
            await island.until_up()
            hello = island.hellos[DECODE]
            assert (hello.role, hello.pid) == ("decode", island.processes[DECODE].pid)
            assert hello.fingerprint["dtype"] == "float32" and hello.limits.max_num_seqs == 16
            island.on_report = lambda: evict_some(island)
            submit_all(island)
            await island.until(lambda: island.rules.is_over)
            assert outputs(island) == greedy(tiny_model(FAMILY))
            assert island.rules.num_evicted > 5
            assert not island.rules.failures
            island.rules.pool.check_idle()
            island.hub.send(PREFILL, Stop())
            pid = island.processes[DECODE].pid
            assert pid is not None
            os.kill(pid, signal.SIGTERM)
            assert await island.ended(PREFILL) == 0
            assert await island.ended(DECODE) == 0

    asyncio.run(run())


def evict_some(island: RemoteIsland) -> None:
    if island.rules.num_turns % 5 == 0:
        for entry in island.rules.in_place("running")[:2]:
            island.rules.evict(entry)


def test_a_new_router_starts_from_what_it_knows(tiny_model: Directory) -> None:
    """Nothing that was ordered by the one before is said to it."""

    async def run() -> None:
        async with RemoteIsland(tiny_model(FAMILY)) as island:
            await island.until_up()
            submit_all(island)
            await island.until(lambda: num_tokens(island) > 100)
            costs = [hello.cost for hello in island.hellos.values()]
            assert all(cost and not cost.has_free_copies for cost in costs)
            old, island.epoch = dict(island.hellos), Epoch(2)
            island.hub.close()
            await island.until(lambda: not island.hellos)
            await island.listen()
            await island.until_up()
            assert {each.pid for each in island.hellos.values()} == {each.pid for each in old.values()}
            await island.until(lambda: island.rules.is_over)
            assert outputs(island) == greedy(tiny_model(FAMILY))

    asyncio.run(run())


def has_more_tokens(island: RemoteIsland, than: int) -> bool:
    return num_tokens(island) > than


def is_gone(island: RemoteIsland, instance_id: InstanceId) -> bool:
    return instance_id not in island.hellos


def test_killed_instances_and_their_successors(tiny_model: Directory) -> None:
    async def run() -> None:
        async with RemoteIsland(tiny_model(FAMILY)) as island:
            await island.until_up()
            submit_all(island)
            for victim, enough in ((DECODE, 100), (PREFILL, 0)):
                await island.until(partial(has_more_tokens, island, enough))
                island.processes[victim].kill()
                await island.until(partial(is_gone, island, victim), timeout_s=60.0)
                island.start(victim)
            await island.until_up()
            await island.until(lambda: island.rules.is_over)
            assert outputs(island) == greedy(tiny_model(FAMILY))

    asyncio.run(run())


@pytest.mark.slow
def test_what_can_not_go_on_ends_with_an_error(tiny_model: Directory) -> None:
    async def run() -> None:
        async with RemoteIsland(tiny_model(FAMILY)) as island:
            await island.until_up()
            island.hub.send(DECODE, Prefill([]))
            assert await island.ended(DECODE) == 1
            island.processes[PREFILL].kill()
            await island.until(lambda: not island.hellos)
            # the router does not take it
            island.hub._members = {DECODE: "decode"}
            island.start(PREFILL)
            assert await island.ended(PREFILL) == 1

    asyncio.run(run())
