"""The ends of batches and of background responses are told, and nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import openai
import pytest

from tests.gateway.batching import CHATS, QUICK, jsonl, question, questions
from tests.gateway.served import Served, served
from tests.gateway.webhooks.delivering import QUICK as WEBHOOKS
from tests.gateway.webhooks.receiver import SECRET, Receiver, receiving
from tests.store.redis_process import RedisProcess, redis_running


@dataclass
class At:
    served: Served
    receiver: Receiver
    redis: RedisProcess

    @property
    def client(self) -> openai.AsyncOpenAI:
        return self.served.client

    async def batch(self, lines: bytes, **more: Any) -> Any:
        file = await self.client.files.create(file=("in.jsonl", lines), purpose="batch")
        return await self.client.batches.create(
            input_file_id=file.id, endpoint=CHATS, completion_window="24h", **more
        )

    async def told(self, count: int) -> list[tuple[str, str]]:
        """(type, what it is about)"""
        events = [each.unwrapped() for each in await self.receiver.until(count)]
        return [(event.type, event.data.id) for event in events]


def play(scenario: Callable[[At], Awaitable[None]], **options: Any) -> None:
    async def within_time() -> None:
        async with asyncio.timeout(120), at_work(**options) as at:
            await scenario(at)

    asyncio.run(within_time())


@asynccontextmanager
async def at_work(tells_all: bool = True, **options: Any) -> AsyncIterator[At]:
    async with redis_running() as redis, receiving() as receiver:
        config = replace(WEBHOOKS, url=(receiver.url,) if tells_all else (), **options)
        if "allowed_urls" in options:
            config = replace(config, allowed_urls=(f"http://127.0.0.1:{receiver.port}/own",))
        secrets = replace(config, url=(receiver.url,)).secrets({"ALIGNEDSERVE_WEBHOOK_SECRET": SECRET})
        async with served(
            store_url=redis.url, batches=QUICK, webhooks=config, webhook_secrets=secrets
        ) as found:
            yield At(found, receiver, redis)


@pytest.mark.slow
def test_a_batch_that_ends_is_told_whatever_its_end() -> None:
    async def scenario(at: At) -> None:
        done = await at.batch(jsonl(questions(3)))
        assert await at.told(1) == [("batch.completed", done.id)]
        failed = await at.batch(b"nonsense")
        assert (await at.told(2))[1:] == [("batch.failed", failed.id)]
        at.served.router.allowed = 0
        cancelled = await at.batch(jsonl(questions(3)))
        await at.client.batches.cancel(cancelled.id)
        assert (await at.told(3))[2:] == [("batch.cancelled", cancelled.id)]
        at.served.router.allowed = 0
        expired = await at.batch(jsonl(questions(3)))
        while (await at.client.batches.retrieve(expired.id)).status != "in_progress":
            await asyncio.sleep(0.02)
        await its_time_is_up(at, expired.id)
        assert (await at.told(4))[3:] == [("batch.expired", expired.id)]
        # A status that is told can be read.
        assert (await at.client.batches.retrieve(expired.id)).status == "expired"

    play(scenario)


async def its_time_is_up(at: At, job_id: str) -> None:
    """The job's deadline has passed in the store, where the gateway finds it when it takes the job again."""
    from alignedserve.store import JobId
    from alignedserve.store.redis_store import RedisStore
    from alignedserve.store.scripts import PREFIX

    store = RedisStore(at.redis.url)
    job = await store.job(JobId(job_id))
    assert job
    late = msgspec.structs.replace(job, expires_at=1)
    assert await store.replace_job(job, late, None)
    # Its holder has lost it.
    await store._redis.delete(f"{PREFIX}lease:{job_id}", f"{PREFIX}holder:{job_id}")
    await store.close()


def test_a_response_in_the_background_is_told_and_no_other() -> None:
    async def scenario(at: At) -> None:
        await at.client.responses.create(model="demo", input="How far?")
        done = await at.client.responses.create(model="demo", input="How far?", background=True)
        assert await at.told(1) == [("response.completed", done.id)]
        at.served.router.allowed = 0
        cancelled = await at.client.responses.create(model="demo", input="How far?", background=True)
        await at.client.responses.cancel(cancelled.id)
        assert (await at.told(2))[1:] == [("response.cancelled", cancelled.id)]
        at.served.router.allowed = None
        short = await at.client.responses.create(
            model="demo", input="How far?", background=True, max_output_tokens=2
        )
        assert (await at.told(3))[2:] == [("response.incomplete", short.id)]

    play(scenario)


def test_a_batch_may_name_its_own_url_where_it_is_allowed() -> None:
    async def scenario(at: At) -> None:
        base = f"http://127.0.0.1:{at.receiver.port}"
        own = await at.batch(
            jsonl([question(1)]), extra_body={"alignedserve": {"webhook_url": f"{base}/own/1?x=y"}}
        )
        assert await at.told(1) == [("batch.completed", own.id)]
        assert at.receiver.told[0].path == "/own/1?x=y"
        for url in (
            f"{base}/other",
            "http://localhost/own/1",
            f"{base}/own/../other",
            "nonsense",
            f"{base}/own x",
        ):
            with pytest.raises(openai.BadRequestError, match="alignedserve.webhook_url"):
                await at.batch(jsonl([question(1)]), extra_body={"alignedserve": {"webhook_url": url}})
        with pytest.raises(openai.BadRequestError, match="alignedserve.webhook_url"):
            await at.batch(jsonl([question(1)]), extra_body={"alignedserve": {"webhook_url": 7}})

    play(scenario, tells_all=False, allowed_urls=())


def test_without_leave_no_url_may_be_named() -> None:
    async def scenario(at: At) -> None:
        with pytest.raises(openai.BadRequestError, match="does not post to that URL"):
            await at.batch(
                jsonl([question(1)]), extra_body={"alignedserve": {"webhook_url": at.receiver.url}}
            )

    play(scenario, tells_all=False)
