"""When a batch will be done, and how long batches took, as clients and operators see it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from openai.types import Batch
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.batching import QUICK, System, play, questions
from tests.gateway.openai.test_batches import answer_first


def said(batch: Batch) -> dict[str, Any]:
    assert batch.model_extra
    found: dict[str, Any] = batch.model_extra["alignedserve"]
    return found


async def turnarounds(at: System) -> dict[str, float]:
    text = (await at.gateway.http.get("/metrics")).text
    return {
        sample.labels["window"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "alignedserve:batch_turnaround_seconds_count"
    }


@pytest.mark.slow
def test_a_batch_that_runs_says_when_it_will_be_done() -> None:
    async def scenario(at: System) -> None:
        at.router.allowed = 0
        batch = await at.gateway.submit(questions(40))
        assert said(batch) == {"estimated_completion_at": None, "progress": 0.0}
        waiting = await at.gateway.until(batch, "in_progress")
        await at.router.until(lambda: len(at.router.submitted) == 40)
        assert said(waiting)["estimated_completion_at"] is None
        # A line is answered now and then.
        for submit in at.router.submitted[:30]:
            at.router.allowed = None
            at.router._say(submit.request.key)
            at.router.allowed = 0
            await asyncio.sleep(0.2)
        now = time.time()
        batch = await at.client.batches.retrieve(batch.id)
        found = said(batch)
        # What is left takes some seconds more, and a machine that is busy some times that.
        assert now - 1 <= found["estimated_completion_at"] < now + 600
        assert 0.5 < found["progress"] < 0.8
        (listed,) = (await at.client.batches.list()).data
        assert said(listed)["estimated_completion_at"] is not None
        at.router.allow(None)
        batch = await at.gateway.until(batch, "completed")
        assert said(batch) == {"estimated_completion_at": None, "progress": 1.0}

    # A gateway that is slow must not lose the job while lines are answered one by one.
    play(scenario, replace(QUICK, lease_s=60.0))


@pytest.mark.slow
def test_turnaround_is_counted_by_window() -> None:
    async def scenario(at: System) -> None:
        assert await turnarounds(at) == {"1h": 0, "6h": 0, "24h": 0, "7d": 0}
        for window in ("1h", "5h", "24h"):
            await at.gateway.until(await at.gateway.submit(questions(2), window=window), "completed")
        await at.gateway.until(await at.gateway.submit(b"nonsense"), "failed")
        answer_first(at, len(at.router.submitted))
        batch = await at.gateway.until(await at.gateway.submit(questions(2)), "in_progress")
        await at.client.batches.cancel(batch.id)
        await at.gateway.until(batch, "cancelled")
        # They are counted as soon as the store has them; the test ends when it takes too long.
        while sum((await turnarounds(at)).values()) < 3:
            await asyncio.sleep(0.02)
        assert await turnarounds(at) == {"1h": 1, "6h": 1, "24h": 1, "7d": 0}

    play(scenario)
