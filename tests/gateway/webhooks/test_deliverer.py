"""Webhooks reach a real receiver through a real Redis, at least once, whatever dies or is away, until they are given
up."""

from __future__ import annotations

import asyncio
import logging
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpcore2
import pytest
import trustme
from openai import InvalidWebhookSignatureError

from alignedserve.gateway.webhooks.config import WebhookConfig
from alignedserve.gateway.webhooks.deliverer import Deliverer
from alignedserve.gateway.webhooks.events import Events
from alignedserve.gateway.webhooks.network import PublicNetwork
from alignedserve.store import FileRecord, JobRecord, Lease, LeaseLost, deliveries
from alignedserve.store import redis_deliveries as script
from alignedserve.store.records import new_file_id, new_job_id
from alignedserve.store.redis_store import RedisStore
from alignedserve.store.scripts import PREFIX
from tests.gateway.webhooks.delivering import QUICK
from tests.gateway.webhooks.receiver import OTHER_SECRET, SECRET, Receiver, receiving, status, unused_port
from tests.store.redis_process import RedisProcess, redis_running


@dataclass
class At:
    redis: RedisProcess
    store: RedisStore
    receiver: Receiver

    async def ended_job(self, *urls: str, own_url: str | None = None) -> JobRecord:
        """A job that has just been completed, of which `urls` are to be told."""
        store, file = self.store, FileRecord(new_file_id(), "in.jsonl", "batch", 1, 1, 0)
        await store.put_chunk(file.id, "", 0, b"x")
        await store.commit_file(file)
        now = int(time.time())
        job = JobRecord(
            id=new_job_id(),
            endpoint="/v1/chat/completions",
            input_file_id=file.id,
            completion_window="24h",
            created_at=now,
            expires_at=now + 86400,
            webhook_url=own_url,
        )
        await store.add_job(job)
        (lease,) = await store.take("validate", "test", 60, time.time(), 1)
        over = JobRecord(
            **{name: getattr(job, name) for name in job.__struct_fields__} | {"status": "completed"}
        )
        assert await store.replace_job(
            job, over, lease, [], Events(urls or (self.receiver.url,)).of_job(over)
        )
        return over

    async def pending(self) -> int:
        return int(await self.store._redis.zcard(f"{PREFIX}open:delivering"))

    async def until_none_is_pending(self) -> None:
        while await self.pending():
            await asyncio.sleep(0.01)
        left = await self.store._redis.keys(f"{PREFIX}delivery:*")
        assert not left
        assert not await self.store._redis.keys(f"{PREFIX}lease:evt*")


def play(scenario: Callable[[At], Awaitable[None]]) -> None:
    async def within_time() -> None:
        async with asyncio.timeout(120), redis_running() as redis, receiving() as receiver:
            store = RedisStore(redis.url)
            await scenario(At(redis, store, receiver))
            await store.close()

    asyncio.run(within_time())


@asynccontextmanager
async def delivering(
    at: At, config: WebhookConfig = QUICK, secret: str = SECRET
) -> AsyncIterator[Counter[str]]:
    counts: Counter[str] = Counter()
    used = replace(config, url=("https://unused.example/",))
    secrets = used.secrets({"ALIGNEDSERVE_WEBHOOK_SECRET": secret})
    deliverer = Deliverer(at.store.deliveries, config, secrets, counts, "test")
    running = asyncio.create_task(deliverer.run())
    try:
        yield counts
    finally:
        deliverer.stop()
        await running


def test_openais_client_takes_what_is_told() -> None:
    async def scenario(at: At) -> None:
        job = await at.ended_job()
        async with delivering(at) as counts:
            (told,) = await at.receiver.until(1)
            await at.until_none_is_pending()
        event = told.unwrapped()
        assert (event.type, event.data.id, event.object) == ("batch.completed", job.id, "event")
        assert event.id == told.headers["webhook-id"] and told.path == "/hooks/all"
        assert told.headers["content-type"] == "application/json"
        assert told.headers["host"] == f"127.0.0.1:{at.receiver.port}"
        with pytest.raises(InvalidWebhookSignatureError):
            told.unwrapped(OTHER_SECRET)
        assert counts == {"delivered": 1}

    play(scenario)


@pytest.mark.slow
def test_while_secrets_are_changed_both_fit() -> None:
    async def scenario(at: At) -> None:
        await at.ended_job()
        async with delivering(at, secret=f"{OTHER_SECRET} {SECRET}"):
            (told,) = await at.receiver.until(1)
        assert told.unwrapped(SECRET) == told.unwrapped(OTHER_SECRET)

    play(scenario)


def test_each_url_is_told_once_and_the_jobs_own_too() -> None:
    async def scenario(at: At) -> None:
        base = f"http://127.0.0.1:{at.receiver.port}"
        await at.ended_job(f"{base}/a", f"{base}/b", own_url=f"{base}/own")
        async with delivering(at):
            told = await at.receiver.until(3)
            await at.until_none_is_pending()
        assert sorted(each.path for each in told) == ["/a", "/b", "/own"]
        assert len({each.headers["webhook-id"] for each in told}) == 1

    play(scenario)


@pytest.mark.drawn(one_in=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "answer", [status(500), status(404), status(302, "location: /other"), b"nonsense\r\n\r\n", b""]
)
def test_a_receiver_that_fails_is_tried_again_with_the_same_id(answer: bytes) -> None:
    async def scenario(at: At) -> None:
        at.receiver.answer = lambda number: answer if number < 4 else status(200)
        await at.ended_job()
        async with delivering(at) as counts:
            told = await at.receiver.until(4)
            await at.until_none_is_pending()
        assert len({(each.path, each.body, each.headers["webhook-id"]) for each in told}) == 1
        assert all(each.unwrapped() for each in told)
        assert counts == {"failed": 3, "delivered": 1}

    play(scenario)


@pytest.mark.slow
def test_a_receiver_that_is_away_is_told_when_it_is_there() -> None:
    async def scenario(at: At) -> None:
        port = unused_port()
        await at.ended_job(f"http://127.0.0.1:{port}/later")
        async with delivering(at) as counts:
            while counts["failed"] < 3:
                await asyncio.sleep(0.01)
            async with receiving(port) as receiver:
                await receiver.until(1)
                await at.until_none_is_pending()

    play(scenario)


@pytest.mark.slow
def test_a_receiver_that_hangs_holds_up_no_other_and_is_tried_again() -> None:
    async def scenario(at: At) -> None:
        at.receiver.answer = lambda number: None
        await at.ended_job()
        async with receiving() as other, delivering(at) as counts:
            await at.receiver.until(1)
            await at.ended_job(other.url)
            await other.until(1)
            while not counts["delivered"]:
                await asyncio.sleep(0.01)
            assert counts == {"delivered": 1}
        # The first was given back. From here on a try is short, and this receiver hangs until one has failed.
        async with delivering(at, replace(QUICK, try_s=1.0)) as counts:
            at.receiver.answer = lambda number: status(200) if counts["failed"] else None
            told = await at.receiver.until(3)
            await at.until_none_is_pending()
        assert len({each.headers["webhook-id"] for each in told}) == 1
        assert counts["failed"] and counts["delivered"] == 1

    play(scenario)


@pytest.mark.slow
def test_after_its_time_it_is_dropped_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(at: At) -> None:
        at.receiver.answer = lambda number: status(503)
        await at.ended_job(f"{at.receiver.url}?token=hidden")
        async with delivering(at, replace(QUICK, give_up_s=1.0)) as counts:
            await at.until_none_is_pending()
        assert counts["dropped"] == 1 and counts["failed"] >= 1

    with caplog.at_level(logging.INFO, logger="alignedserve"):
        play(scenario)
    (line,) = [each.message for each in caplog.records if "dropped" in each.message]
    assert "it answers 503" in line and "127.0.0.1" in line
    assert "hidden" not in caplog.text


@pytest.mark.slow
def test_this_machine_is_told_only_if_the_operator_lets_it() -> None:
    async def scenario(at: At) -> None:
        await at.ended_job(f"http://localhost:{at.receiver.port}/")
        async with delivering(at, replace(QUICK, allow_private=False)) as counts:
            while counts["failed"] < 2:
                await asyncio.sleep(0.01)
        assert at.receiver.told == []

    play(scenario)


def test_a_name_that_can_be_no_name_can_t_be_reached() -> None:
    """Python raises another error for it, which was taken for one of ours, and tried again for ever."""
    with pytest.raises(httpcore2.ConnectError, match="its name is not valid"):
        asyncio.run(PublicNetwork(allows_private=True).connect_tcp("a" * 64 + ".example", 80))


@pytest.mark.slow
def test_over_tls_only_who_has_the_name_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A receiver whose certificate is of another name hears nothing; the right one is told, at the same address."""
    caplog.set_level(logging.INFO, "alignedserve.gateway.webhooks.deliverer")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))

    def named(name: str) -> ssl.SSLContext:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(name).configure_cert(tls)
        return tls

    async def scenario(at: At) -> None:
        async with receiving(tls=named("other.example")) as wrong:
            job = await at.ended_job(wrong.url)
            async with delivering(at) as counts:
                while not counts["failed"]:
                    await asyncio.sleep(0.01)
            assert not wrong.told
        async with receiving(wrong.port, named("127.0.0.1")) as right, delivering(at):
            (told,) = await right.until(1)
            await at.until_none_is_pending()
        assert told.unwrapped().data.id == job.id

    play(scenario)
    assert any("certificate verify failed" in record.getMessage() for record in caplog.records)


@pytest.mark.slow
def test_what_dies_with_its_process_is_told_by_the_next() -> None:
    async def scenario(at: At) -> None:
        at.receiver.answer = lambda number: None if number == 1 else status(200)
        await at.ended_job()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.gateway.webhooks.delivering", at.redis.url
        )
        # It is killed while the receiver has the event, and has not answered.
        await at.receiver.until(1)
        process.kill()
        await process.wait()
        assert await at.pending() == 1
        # It would lapse after two tries, and lapses soon instead.
        (lease,) = await at.store._redis.keys(f"{PREFIX}lease:evt*")
        assert 0 < await at.store._redis.pttl(lease) <= 2000 * QUICK.try_s
        assert await at.store._redis.pexpire(lease, 1000)
        async with delivering(at):
            first, second = await at.receiver.until(2)
            await at.until_none_is_pending()
        assert (first.body, first.headers["webhook-id"]) == (second.body, second.headers["webhook-id"])

    play(scenario)


@pytest.mark.slow
def test_it_waits_for_a_store_that_is_away() -> None:
    async def scenario(at: At) -> None:
        await at.ended_job()
        await at.redis.kill()
        async with delivering(at):
            await at.redis.start()
            await at.receiver.until(1)
            await at.until_none_is_pending()

    play(scenario)


@pytest.mark.slow
def test_one_that_has_lost_its_lease_changes_nothing() -> None:
    async def scenario(at: At) -> None:
        await at.ended_job()
        store = at.store.deliveries
        (lost,) = await store.take("a", 0.001, time.time(), 5)
        delivery = await store.get(lost)
        assert delivery
        while not (held := await store.take("b", 60, time.time(), 5)):
            await asyncio.sleep(0.01)
        for call in (store.end(lost), store.put_off(lost, delivery, 0)):
            with pytest.raises(LeaseLost):
                await call
        assert await store.take("c", 60, time.time(), 5) == []
        await store.put_off(held[0], delivery, time.time() + 1000)
        assert await store.take("c", 60, time.time(), 5) == []
        (again,) = await store.take("c", 60, time.time() + 1000, 5)
        await store.end(again)
        assert await store.get(again) is None
        with pytest.raises(LeaseLost):
            await store.end(Lease("evt_none-0", "x"))
        await at.until_none_is_pending()

    play(scenario)


@pytest.mark.slow
def test_what_is_too_much_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "DELIVER", script.DELIVER.replace(str(deliveries.MAX_PENDING), "2"))
    monkeypatch.setattr("alignedserve.store.redis_store.DELIVER", script.DELIVER)

    async def scenario(at: At) -> None:
        await at.ended_job(*(f"{at.receiver.url}/{number}" for number in range(5)))
        assert await at.pending() == 2
        async with delivering(at) as counts:
            await at.receiver.until(2)
            await at.until_none_is_pending()
        assert counts == {"delivered": 2, "dropped": 3}
        assert await at.store.deliveries.refused() == 0

    play(scenario)
