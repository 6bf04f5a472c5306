"""/v1/batches with OpenAI's own client: to the end, to errors, and past whatever dies on the way."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import openai
import pytest
from msgspec.structs import replace as with_field
from openai.types import Batch

from alignedserve.batch.results import LineAnswer
from alignedserve.gateway.generation.responding import LineAnswers
from alignedserve.gateway.openai.batch_jobs.routes import batch_body
from alignedserve.protocol.messages import NewTokens, Rejected, Request, Submit
from alignedserve.store import FileId, JobId, JobRecord, StoreAway, Tally
from alignedserve.store.redis_store import RedisStore
from alignedserve.store.scripts import PREFIX
from tests.gateway.batching import CHATS, QUICK, System, gateway_on, jsonl, play, question, questions
from tests.gateway.scripted import TOKENIZER


def counts(batch: Batch) -> tuple[int, int, int]:
    found = batch.request_counts
    assert found
    return found.total, found.completed, found.failed


def answer_first(at: System, count: int) -> None:
    """The requests after those get no token."""

    def hold_back(submit: Submit) -> None:
        at.router.allowed = None if len(at.router.submitted) <= count else 0

    at.router.refuse = hold_back


@pytest.mark.slow
def test_what_its_prompts_found_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(at: System) -> None:
        def found(request: Request, news: NewTokens) -> NewTokens:
            return news if news.first else msgspec.structs.replace(news, num_reused=5)

        monkeypatch.setattr(at.router, "_tokens", found)
        done = await at.gateway.until(await at.gateway.submit(questions(7)), "completed")
        assert done.usage and done.usage.input_tokens_details.cached_tokens == 35

    play(scenario)


def test_a_batch_is_answered_line_by_line() -> None:
    async def scenario(at: System) -> None:
        batch = await at.gateway.submit(questions(30))
        assert (batch.status, batch.object, batch.endpoint) == ("validating", "batch", CHATS)
        assert batch.expires_at == batch.created_at + 86400
        done = await at.gateway.until(batch, "completed")
        assert counts(done) == (30, 30, 0) and done.error_file_id is None and done.model == "demo"
        assert done.in_progress_at and done.finalizing_at and done.completed_at
        lines = await at.gateway.lines_of(done.output_file_id)
        assert [line["custom_id"] for line in lines] == [f"q{number}" for number in range(30)]
        assert len({line["id"] for line in lines}) == 30
        for line in lines:
            assert line["error"] is None and line["response"]["status_code"] == 200
            body = line["response"]["body"]
            assert body["object"] == "chat.completion"
            assert body["choices"][0]["message"]["content"] == "one two three"
        assert done.usage and done.usage.total_tokens == sum(
            line["response"]["body"]["usage"]["total_tokens"] for line in lines
        )
        file = await at.client.files.retrieve(str(done.output_file_id))
        assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")

    play(scenario)


def test_lines_run_as_best_effort_due_when_the_job_is() -> None:
    async def scenario(at: System) -> None:
        batch = await at.gateway.submit([question(1, temperature=0)], window="2h")
        await at.gateway.until(batch, "completed")
        request = at.router.submitted[0].request
        assert request.tier == "be" and request.deadline_s is not None
        assert 7100 < request.deadline_s - time.monotonic() <= 7200
        messages = [{"role": "user", "content": "How far is 1?"}]
        assert request.prompt == TOKENIZER.chat_ids(messages) and request.params.temperature == 0

    play(scenario)


def test_completions_are_answered_too() -> None:
    async def scenario(at: System) -> None:
        url = "/v1/completions"
        body = {"model": "demo", "prompt": "How far?", "max_tokens": 100}
        line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
        batch = await at.gateway.until(await at.gateway.submit([line], url=url), "completed")
        (answer,) = await at.gateway.lines_of(batch.output_file_id)
        assert answer["response"]["body"]["choices"][0]["text"] == "one two three"

    play(scenario)


def test_a_bad_body_is_answered_so_and_hurts_no_other() -> None:
    async def scenario(at: System) -> None:
        bad: list[dict[str, Any]] = [
            {"top_p": 2.0},
            {"stream": True},
            {"n": "1"},
            {"messages": []},
            {"messages": "x"},
        ]
        lines = [question(0), *(question(n, **body) for n, body in enumerate(bad, 1)), question(6)]
        batch = await at.gateway.until(await at.gateway.submit(lines), "completed")
        assert counts(batch) == (7, 2, 5)
        errors = await at.gateway.lines_of(batch.error_file_id)
        assert [(each["line"], each["custom_id"]) for each in errors] == [
            (number + 1, f"q{number}") for number in range(1, 6)
        ]
        params = [each["response"]["body"]["error"]["param"] for each in errors]
        assert params == ["top_p", "stream", "n", "messages", "messages"]
        assert {each["response"]["status_code"] for each in errors} == {400}
        answered = await at.gateway.lines_of(batch.output_file_id)
        assert [each["custom_id"] for each in answered] == ["q0", "q6"]

    play(scenario)


GOOD = question(1)
BAD_FILES: dict[str, tuple[bytes, list[tuple[str, int | None]]]] = {
    "empty": (b"", [("empty_file", None)]),
    "blank": (b"\n \n", [("empty_file", None)]),
    "not JSON": (jsonl([GOOD]) + b"nonsense\n{", [("invalid_json_line", 2), ("invalid_json_line", 3)]),
    "not objects": (b"[]\n", [("invalid_json_line", 1)]),
    "same id": (jsonl([GOOD, question(2), GOOD]), [("duplicate_custom_id", 3)]),
    "other endpoint": (jsonl([GOOD | {"url": "/v1/completions"}]), [("invalid_url", 1)]),
    "other method": (jsonl([GOOD | {"method": "GET"}]), [("invalid_method", 1)]),
    "no body": (jsonl([{k: v for k, v in GOOD.items() if k != "body"}]), [("missing_required_parameter", 1)]),
    "id of a wrong kind": (jsonl([GOOD | {"custom_id": 7}]), [("invalid_type", 1)]),
    "other models": (
        jsonl([GOOD, question(2, model="other")]),
        [("mismatched_model", 2)],
    ),
    "unknown model": (jsonl([question(2, model="other")]), [("model_not_found", 1)]),
    "not UTF-8": (b'{"custom_id": "\xff"}\n', [("invalid_json_line", 1)]),
    "too long a line": (b"x" * (9 << 20) + b"\n" + jsonl([GOOD]), [("line_too_long", 1)]),
    "too many lines": (
        jsonl([GOOD | {"custom_id": str(number)} for number in range(50_001)]),
        [("too_many_lines", None)],
    ),
    "too deep": (b"[" * 100_000, [("invalid_json_line", 1)]),
}


@pytest.mark.slow
def test_a_bad_file_fails_with_line_numbers() -> None:
    async def scenario(at: System) -> None:
        for name, (content, problems) in BAD_FILES.items():
            batch = await at.gateway.until(await at.gateway.submit(content), "failed")
            assert batch.failed_at and batch.errors and batch.errors.data, name
            assert batch.errors.object == "list"
            found = [(each.code, each.line) for each in batch.errors.data]
            assert found[: len(problems)] == problems, name
            assert at.router.submitted == [], name
            # nothing holds it any more
            assert (await at.client.files.delete(batch.input_file_id)).deleted

    play(scenario)


@pytest.mark.slow
def test_blank_lines_count_in_numbers_and_nowhere_else() -> None:
    async def scenario(at: System) -> None:
        content = b"\n" + jsonl([question(1)]) + b"\r\n" + jsonl([question(2, top_p=2.0)]).rstrip()
        batch = await at.gateway.until(await at.gateway.submit(content), "completed")
        assert counts(batch) == (2, 1, 1)
        (error,) = await at.gateway.lines_of(batch.error_file_id)
        assert error["line"] == 4

    play(scenario)


NO_BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"endpoint": "/v1/audio/speech"}, "endpoint"),
    ({"completion_window": "9m"}, "completion_window"),
    ({"completion_window": "8d"}, "completion_window"),
    ({"completion_window": "²h"}, "completion_window"),
    ({"input_file_id": "file-000000000000000000000000"}, "input_file_id"),
    ({"input_file_id": "nonsense"}, "input_file_id"),
    ({"input_file_id": 7}, "input_file_id"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ({"metadata": {"k" * 65: ""}}, "metadata"),
    ({"metadata": {"a": "v" * 513}}, "metadata"),
    ({"metadata": {"a": "\ud800"}}, "metadata"),
    ({"endpoint": "x" * 257}, "endpoint"),
    ({"input_file_id": "file://" + "x" * 4096}, "input_file_id"),
    ({"alignedserve": {"webhook_url": "https://" + "x" * 2048}}, "alignedserve.webhook_url"),
]


def test_what_can_not_be_a_batch_is_refused_by_name() -> None:
    async def scenario(at: System) -> None:
        file = await at.gateway.upload(questions(1))
        for changed, param in NO_BATCHES:
            asked = {"input_file_id": file.id, "endpoint": CHATS, "completion_window": "24h"} | changed
            headers = {"content-type": "application/json"}
            answer = await at.gateway.http.post("/v1/batches", content=json.dumps(asked), headers=headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), changed
            assert (await at.client.batches.list()).data == []

    play(scenario)


@pytest.mark.slow
def test_metadata_has_the_limits_of_openai() -> None:
    async def scenario(at: System) -> None:
        file = await at.gateway.upload(questions(1))
        metadata = {f"{n:064}": "ü" * 512 for n in range(16)}
        batch = await at.client.batches.create(
            input_file_id=file.id, endpoint=CHATS, completion_window="24h", metadata=metadata
        )
        assert batch.metadata == metadata
        assert (await at.gateway.until(batch, "completed")).metadata == metadata
        asked = {"input_file_id": file.id, "endpoint": CHATS, "completion_window": "24h"}
        choices: list[dict[str, Any]] = [{}, {"metadata": None}, {"metadata": {}}]
        for given in choices:
            answer = await at.gateway.http.post("/v1/batches", json=asked | given)
            assert answer.json()["metadata"] == given.get("metadata")

    play(scenario)


def test_metadata_of_records_that_hold_it_as_an_object_is_shown_and_kept() -> None:
    first = JobRecord(
        id=JobId("batch_x"),
        endpoint=CHATS,
        input_file_id=FileId("file-x"),
        completion_window="1h",
        created_at=1,
        expires_at=2,
        metadata={"ä": "b"},
    )
    stored = msgspec.msgpack.encode(first)
    job = msgspec.msgpack.decode(stored, type=JobRecord)
    assert msgspec.json.decode(msgspec.json.encode(batch_body(job, Tally())))["metadata"] == {"ä": "b"}
    # A record is replaced only if its bytes are those that were read.
    assert msgspec.msgpack.encode(job) == stored


@pytest.mark.slow
def test_batches_are_listed_newest_first_in_pages() -> None:
    async def scenario(at: System) -> None:
        file = await at.gateway.upload(questions(1))
        made = [
            await at.client.batches.create(
                input_file_id=file.id, endpoint=CHATS, completion_window="24h", metadata={"n": str(number)}
            )
            for number in range(3)
        ]
        page = await at.client.batches.list(limit=2)
        assert [batch.id for batch in page.data] == [made[2].id, made[1].id] and page.has_more
        assert [batch.metadata async for batch in page] == [{"n": "2"}, {"n": "1"}, {"n": "0"}]
        with pytest.raises(openai.NotFoundError):
            await at.client.batches.retrieve("batch_none")
        for batch in made:
            await at.gateway.until(batch, "completed")

    play(scenario)


@pytest.mark.slow
def test_a_bounded_number_of_lines_runs_at_a_time() -> None:
    async def scenario(at: System) -> None:
        at.router.allowed = 0
        batch = await at.gateway.submit(questions(20))
        other = await at.gateway.submit(questions(20))
        await at.router.until(lambda: len(at.router.submitted) == 5)
        await at.gateway.until(batch, "in_progress")
        await at.gateway.until(other, "in_progress")
        assert len(at.router.submitted) == 5
        at.router.allow(None)
        await at.gateway.until(batch, "completed")
        await at.gateway.until(other, "completed")
        assert len(at.router.submitted) == 40

    play(scenario, replace(QUICK, max_num_lines=5))


@pytest.mark.slow
def test_long_lines_run_a_few_at_a_time() -> None:
    async def scenario(at: System) -> None:
        at.router.allowed = 0
        batch = await at.gateway.submit([question(number, user="x" * 10_000) for number in range(9)])
        await at.router.until(lambda: len(at.router.submitted) == 2)
        # the third may come now, or never
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(at.router.until(lambda: len(at.router.submitted) > 2), 0.3)
        at.router.allow(None)
        assert counts(await at.gateway.until(batch, "completed")) == (9, 9, 0)

    play(scenario, replace(QUICK, max_bytes=25_000))


def test_a_cancelled_batch_keeps_what_it_has() -> None:
    async def scenario(at: System) -> None:
        answer_first(at, 4)
        batch = await at.gateway.submit(questions(10))
        await at.router.until(lambda: len(at.router.submitted) == 8)
        cancelling = await at.client.batches.cancel(batch.id)
        assert cancelling.status in ("cancelling", "cancelled") and cancelling.cancelling_at
        batch = await at.gateway.until(cancelling, "cancelled")
        assert batch.cancelled_at and counts(batch) == (10, 4, 6)
        lines = await at.gateway.lines_of(batch.output_file_id)
        assert [line["custom_id"] for line in lines] == ["q0", "q1", "q2", "q3"]
        # Lines that had begun, and lines that had not.
        errors = await at.gateway.lines_of(batch.error_file_id)
        assert [(line["line"], line["custom_id"]) for line in errors] == [
            (n + 1, f"q{n}") for n in range(4, 10)
        ]
        assert {(line["response"], line["error"]["code"]) for line in errors} == {(None, "batch_cancelled")}
        await at.router.until(lambda: len(at.router.aborted) == 4)
        # again it changes nothing
        assert (await at.client.batches.cancel(batch.id)).status == "cancelled"

    play(scenario, replace(QUICK, max_num_lines=4))


@pytest.mark.slow
def test_what_is_over_can_not_be_cancelled() -> None:
    async def scenario(at: System) -> None:
        batch = await at.gateway.until(await at.gateway.submit(questions(1)), "completed")
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a batch with status 'completed'"):
            await at.client.batches.cancel(batch.id)

    play(scenario)


@pytest.mark.slow
def test_the_input_of_a_running_batch_stays() -> None:
    async def scenario(at: System) -> None:
        at.router.allowed = 0
        batch = await at.gateway.submit(questions(1))
        with pytest.raises(openai.BadRequestError, match="is the input of an unfinished batch"):
            await at.client.files.delete(batch.input_file_id)
        at.router.allow(None)
        await at.gateway.until(batch, "completed")
        await at.client.files.delete(batch.input_file_id)

    play(scenario)


@pytest.mark.slow
def test_when_time_is_up_what_is_left_says_so() -> None:
    async def scenario(at: System) -> None:
        at.router.allowed = 0
        batch = await at.gateway.submit(questions(3), window="1h")
        await at.router.until(lambda: len(at.router.submitted) == 3)
        at.router.allowed = None
        at.router._say(at.router.submitted[0].request.key)
        while counts(await at.client.batches.retrieve(batch.id)) != (3, 1, 0):
            await asyncio.sleep(0.02)
        await the_time_is_up_for(at, batch)
        async with gateway_on(at.router_port, at.redis.url, name="gateway-1") as other:
            done = await other.until(batch, "expired")
            assert done.expired_at and counts(done) == (3, 1, 2)
            assert [line["custom_id"] for line in await other.lines_of(done.output_file_id)] == ["q0"]
            errors = await other.lines_of(done.error_file_id)
            assert [line["custom_id"] for line in errors] == ["q1", "q2"]
            assert {line["error"]["code"] for line in errors} == {"batch_expired"}
            assert {line["response"] for line in errors} == {None}
            # each of them has missed its deadline, whether it ran or not
            metrics = other.process.telemetry.metrics.of("be")
            assert metrics.objectives["deadline", False] == 2

    play(scenario)


@pytest.mark.slow
def test_time_is_up_for_a_job_that_waits_for_a_place_too() -> None:
    config = replace(QUICK, max_num_jobs=1)

    async def scenario(at: System) -> None:
        at.router.allowed = 0
        first = await at.gateway.submit(questions(1), window="1h")
        await at.router.until(lambda: len(at.router.submitted) == 1)
        second = await at.gateway.until(await at.gateway.submit(questions(2)), "in_progress")
        await the_time_is_up_for(at, second)
        async with gateway_on(at.router_port, at.redis.url, config, name="gateway-1") as other:
            assert counts(await other.until(second, "expired")) == (2, 0, 2)
            assert (await other.client.batches.retrieve(first.id)).status == "in_progress"

    play(scenario, config)


@pytest.mark.slow
def test_a_job_whose_file_goes_fails() -> None:
    async def scenario(at: System) -> None:
        at.router.allowed = 0
        batch = await at.gateway.until(await at.gateway.submit(questions(2)), "in_progress")
        at.gateway.process.stop()
        store = RedisStore(at.redis.url)
        # as a Redis does that is told to make room
        assert await store._redis.unlink(f"{PREFIX}data:{batch.input_file_id}") == 1
        await store.close()
        async with gateway_on(at.router_port, at.redis.url, name="gateway-1") as other:
            failed = await other.until(batch, "failed")
            assert failed.errors and failed.errors.data
            assert [error.code for error in failed.errors.data] == ["file_not_found"]

    play(scenario)


@pytest.mark.slow
def test_a_record_that_cannot_be_read_is_not_the_end_of_all_jobs() -> None:
    async def scenario(at: System) -> None:
        store = RedisStore(at.redis.url)
        await store._redis.set(f"{PREFIX}job:batch_x", b"\xff")
        await store._redis.zadd(f"{PREFIX}open:validating", {"batch_x": 0})
        # it is taken first, and again when its lease has lapsed
        for _ in range(3):
            await at.gateway.until(await at.gateway.submit(questions(1)), "completed")
        await store.close()

    play(scenario)


async def the_time_is_up_for(at: System, batch: Batch) -> None:
    """Its gateway puts it down, and whoever takes it up finds that its deadline has passed."""
    at.gateway.process.stop()
    store = RedisStore(at.redis.url)
    job = await store.job(JobId(batch.id))
    assert job and await store.replace_job(job, with_field(job, expires_at=int(time.time())), None)
    await store.close()


@pytest.mark.slow
def test_what_is_not_taken_or_fails_is_tried_again() -> None:
    async def scenario(at: System) -> None:
        number = 0

        def refuse(submit: Submit) -> Rejected | None:
            nonlocal number
            number += 1
            return Rejected(submit.request.key, "full", "the queue is full") if number % 3 else None

        at.router.refuse = refuse
        batch = await at.gateway.until(await at.gateway.submit(questions(10)), "completed")
        assert counts(batch) == (10, 10, 0)

    play(scenario)


@pytest.mark.slow
def test_what_fails_again_and_again_is_an_error() -> None:
    async def scenario(at: System) -> None:
        at.router.allowed = 0
        failing = asyncio.create_task(fail_for_ever(at))
        batch = await at.gateway.until(await at.gateway.submit(questions(2)), "completed")
        failing.cancel()
        assert counts(batch) == (2, 0, 2) and batch.output_file_id is None
        errors = await at.gateway.lines_of(batch.error_file_id)
        assert [line["response"]["status_code"] for line in errors] == [500, 500]
        assert len(at.router.submitted) == 2 * QUICK.max_num_tries

    async def fail_for_ever(at: System) -> None:
        while True:
            await at.router.until(lambda: bool(at.router._open))
            at.router.fail("the logits are NaN")

    play(scenario)


def test_a_second_gateway_goes_on_where_the_first_one_stopped() -> None:
    async def scenario(at: System) -> None:
        answer_first(at, 6)
        batch = await at.gateway.submit(questions(20))
        await at.router.until(lambda: len(at.router.submitted) == 10)
        async with gateway_on(at.router_port, at.redis.url, name="gateway-1") as other:
            at.gateway.process.stop()
            answer_first(at, 1000)
            done = await other.until(batch, "completed")
            assert counts(done) == (20, 20, 0)
            lines = await other.lines_of(done.output_file_id)
            assert [line["custom_id"] for line in lines] == [f"q{number}" for number in range(20)]
            # what was answered was not asked again, what ran was
            assert len(at.router.submitted) == 24

    play(scenario, replace(QUICK, max_num_lines=4))


@pytest.mark.slow
def test_two_gateways_share_jobs_and_no_line_is_answered_twice() -> None:
    # a lease that lapses on a busy machine would be a good reason to answer again
    config = replace(QUICK, lease_s=30.0)

    async def scenario(at: System) -> None:
        async with gateway_on(at.router_port, at.redis.url, config, name="gateway-1") as other:
            batches = [await (at.gateway, other)[n % 2].submit(questions(25)) for n in range(4)]
            for batch in batches:
                done = await at.gateway.until(batch, "completed")
                lines = await other.lines_of(done.output_file_id)
                assert [line["custom_id"] for line in lines] == [f"q{number}" for number in range(25)]
            assert len(at.router.submitted) == 100

    play(scenario, config)


@pytest.mark.slow
class LostAnswers:
    """A store that adds jobs, and whose answers are lost: all, or the first ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_lost, self._add_job = 0, RedisStore.add_job
        losses = self

        async def add_job(self: RedisStore, job: JobRecord) -> bool:
            is_added = await losses._add_job(self, job)
            if losses.num_lost:
                losses.num_lost -= 1
                raise StoreAway("the answer is lost")
            return is_added

        monkeypatch.setattr(RedisStore, "add_job", add_job)


@pytest.mark.slow
def test_a_lost_answer_of_the_store_makes_no_second_job(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(at: System) -> None:
        lost = LostAnswers(monkeypatch)
        lost.num_lost = 2
        batch = await at.gateway.submit(questions(1))
        body = {"requests": [{"custom_id": "a", "params": question(0)["body"] | {"max_tokens": 9}}]}
        lost.num_lost = 2
        response = await at.gateway.http.post("/v1/messages/batches", json=body)
        assert response.status_code == 200, response.text
        made = [each.id for each in (await at.client.batches.list()).data]
        assert made == [response.json()["id"], batch.id] and lost.num_lost == 0
        await at.gateway.until(batch, "completed")

    play(scenario)


@pytest.mark.slow
def test_a_creation_that_is_repeated_with_its_key_makes_no_second_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("alignedserve.store.retry.PATIENCE_S", 0.0)

    async def scenario(at: System) -> None:
        lost = LostAnswers(monkeypatch)
        at.router.allowed = 0
        http, file = at.gateway.http, await at.gateway.upload(questions(2))
        asked = {"input_file_id": file.id, "endpoint": CHATS, "completion_window": "1h"}
        message = {"custom_id": "a", "params": question(0)["body"] | {"max_tokens": 9}}
        for path, body, other in (
            ("/v1/batches", asked, asked | {"completion_window": "2h"}),
            (
                "/v1/messages/batches",
                {"requests": [message]},
                {"requests": [message, message | {"custom_id": "b"}]},
            ),
        ):
            headers, before = {"Idempotency-Key": "mine"}, len((await http.get("/v1/batches")).json()["data"])
            lost.num_lost = 1
            assert (await http.post(path, json=body, headers=headers)).status_code == 503
            answers = [(await http.post(path, json=body, headers=headers)).json() for _ in range(2)]
            (made,) = (await http.get("/v1/batches")).json()["data"][: -before or None]
            assert [each["id"] for each in answers] == [made["id"]] * 2
            response = await http.post(path, json=other, headers=headers)
            assert response.status_code == 400 and "Idempotency-Key" in response.text
            # Without it, each call makes one, and so does another key.
            more = [await http.post(path, json=body, headers=each) for each in ({}, {"Idempotency-Key": "b"})]
            assert len({made["id"], *(each.json()["id"] for each in more)}) == 3

    play(scenario)


@pytest.mark.slow
def test_of_two_creations_at_once_with_one_key_one_makes_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    find_job, both = RedisStore.job, asyncio.Barrier(2)

    async def job(self: RedisStore, job_id: JobId) -> JobRecord | None:
        found = await find_job(self, job_id)
        if found is None:
            # Neither creates it before both have seen that it is not there.
            await both.wait()
        return found

    async def scenario(at: System) -> None:
        at.router.allowed = 0
        monkeypatch.setattr(RedisStore, "job", job)
        http, file = at.gateway.http, await at.gateway.upload(questions(2))
        asked = {"input_file_id": file.id, "endpoint": CHATS, "completion_window": "1h"}
        message = {"custom_id": "a", "params": question(0)["body"] | {"max_tokens": 9}}
        for path, body, other in (
            ("/v1/batches", asked, asked | {"completion_window": "2h"}),
            (
                "/v1/messages/batches",
                {"requests": [message]},
                {"requests": [message, message | {"custom_id": "b"}]},
            ),
        ):
            num_jobs = len((await http.get("/v1/batches")).json()["data"])
            for key, second, statuses in (("same", body, [200, 200]), ("other", other, [200, 400])):
                calls = [
                    http.post(path, json=each, headers={"Idempotency-Key": key}) for each in (body, second)
                ]
                answers = await asyncio.gather(*calls)
                assert sorted(each.status_code for each in answers) == statuses, answers[1].text
                assert len({each.json()["id"] for each in answers if each.status_code == 200}) == 1
                num_jobs += 1
                assert len((await http.get("/v1/batches")).json()["data"]) == num_jobs
        # What the second ones had stored is gone.
        inputs = [each["input_file_id"] for each in (await http.get("/v1/batches")).json()["data"]]
        stored = [each["id"] for each in (await http.get("/v1/files")).json()["data"]]
        assert {*stored} <= {*inputs}

    play(scenario)


def test_a_batch_goes_on_when_redis_is_back() -> None:
    async def scenario(at: System) -> None:
        at.router.allowed = 0
        batch = await at.gateway.submit(questions(10))
        await at.router.until(lambda: len(at.router.submitted) == 10)
        await at.redis.kill()
        # the answers come while there is nowhere to put them
        at.router.allow(None)
        await asyncio.sleep(0)
        await at.redis.start()
        done = await at.gateway.until(batch, "completed")
        assert counts(done) == (10, 10, 0)
        assert len(await at.gateway.lines_of(done.output_file_id)) == 10

    play(scenario)


@pytest.mark.slow
@pytest.mark.drawn(one_in=3)
def test_thousands_of_lines() -> None:
    async def scenario(at: System) -> None:
        at.router.answer = at.router.answer[-1:]
        batch = await at.gateway.submit(questions(3000))
        done = await at.gateway.until(batch, "completed")
        assert counts(done) == (3000, 3000, 0)
        lines = await at.gateway.lines_of(done.output_file_id)
        assert [line["custom_id"] for line in lines] == [f"q{number}" for number in range(3000)]

    play(scenario, limit_s=600)


@pytest.mark.slow
def test_a_line_that_brings_down_whoever_runs_it_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes nobody with it: after a few falls it runs alone."""
    runs: Counter[bytes] = Counter()
    real = LineAnswers.ask

    async def ask(self: LineAnswers, endpoint: str, body: bytes, *told: Any) -> LineAnswer:
        runs[body] += 1
        if b"How far is 3?" in body:
            raise RuntimeError("whatever it is")
        return await real(self, endpoint, body, *told)

    monkeypatch.setattr(LineAnswers, "ask", ask)

    async def scenario(at: System) -> None:
        batch = await at.gateway.until(await at.gateway.submit(questions(8)), "completed")
        assert counts(batch) == (8, 7, 1)
        (error,) = await at.gateway.lines_of(batch.error_file_id)
        assert (error["custom_id"], error["error"]["code"]) == ("q3", "line_failed")
        assert max(runs.values()) == QUICK.max_num_falls

    play(scenario)


@pytest.mark.slow
def test_jobs_that_nobody_has_a_place_for_cost_nothing_and_are_cancelled_at_once() -> None:
    config = replace(QUICK, max_num_jobs=2)

    async def scenario(at: System) -> None:
        at.router.allowed = 0
        file = await at.gateway.upload(questions(1))
        made = [
            await at.client.batches.create(input_file_id=file.id, endpoint=CHATS, completion_window="24h")
            for _ in range(12)
        ]
        # all are looked at, though two of them keep all places
        for batch in made:
            await at.gateway.until(batch, "in_progress")
        store = RedisStore(at.redis.url)
        assert len(await store._redis.keys(f"{PREFIX}lease:*")) == 2
        assert len(at.router.submitted) == 2
        cancelled = await at.client.batches.cancel(made[-1].id)
        await at.gateway.until(cancelled, "cancelled")
        assert await store.count_open() == {"in_progress": 11}
        await store.close()
        at.router.allow(None)
        for batch in made[:-1]:
            await at.gateway.until(batch, "completed")

    play(scenario, config)


@pytest.mark.slow
def test_a_file_of_blank_lines_is_told_so() -> None:
    async def scenario(at: System) -> None:
        batch = await at.gateway.until(await at.gateway.submit(b"\n" * 200_000), "failed")
        assert batch.errors and batch.errors.data
        assert [error.code for error in batch.errors.data] == ["too_many_lines"]
        assert "100000 lines, blank ones among them" in str(batch.errors.data[0].message)

    play(scenario)


@pytest.mark.slow
def test_output_files_expire_if_so_asked() -> None:
    async def scenario(at: System) -> None:
        file = await at.gateway.upload([question(0), question(1, n="x")])
        create: Any = at.client.batches.create
        asked = {"input_file_id": file.id, "endpoint": CHATS, "completion_window": "24h"}
        after = {"anchor": "created_at", "seconds": 7200}
        batch = await at.gateway.until(await create(**asked, output_expires_after=after), "completed")
        assert batch.model_dump()["output_expires_after"] == after
        for file_id in (batch.output_file_id, batch.error_file_id):
            assert file_id
            made = await at.client.files.retrieve(file_id)
            assert made.expires_at == made.created_at + 7200
        store = RedisStore(at.redis.url)
        expired = await store.expired_files(time.time() + 7300)
        assert set(expired) == {batch.output_file_id, batch.error_file_id}
        await store.close()
        for wrong in ({"anchor": "created_at", "seconds": 60}, {"anchor": "now", "seconds": 7200}):
            with pytest.raises(openai.BadRequestError) as error:
                await create(**asked, output_expires_after=wrong)
            assert (error.value.param or "").startswith("output_expires_after")
        plain = await at.gateway.until(await create(**asked), "completed")
        assert plain.output_file_id
        made = await at.client.files.retrieve(plain.output_file_id)
        assert made.expires_at is None and plain.model_dump()["output_expires_after"] is None

    play(scenario)


@pytest.mark.slow
def test_unknown_parameters_of_a_job_are_ignored_and_named() -> None:
    async def scenario(at: System) -> None:
        file = await at.gateway.upload([question(0, newer=1)])
        body = {"input_file_id": file.id, "endpoint": CHATS, "completion_window": "24h", "newer": 1}
        response = await at.gateway.http.post("/v1/batches", json=body)
        assert response.status_code == 200 and response.headers["x-ignored-parameters"] == "newer"
        batch = await at.client.batches.retrieve(response.json()["id"])
        await at.gateway.until(batch, "completed")

    play(scenario)


@pytest.mark.slow
def test_lines_that_begin_alike_run_together_and_come_out_in_their_order() -> None:
    async def scenario(at: System) -> None:
        documents = ["x y " * 300, "z y " * 300]
        lines = [question(n, messages=[{"role": "user", "content": documents[n % 2]}]) for n in range(12)]
        batch = await at.gateway.until(await at.gateway.submit(lines), "completed")
        prompts = [tuple(submit.request.prompt) for submit in at.router.submitted]
        assert len(prompts) == 12 and prompts[:6] == prompts[:1] * 6 and prompts[6:] == prompts[6:7] * 6
        answered = await at.gateway.lines_of(batch.output_file_id)
        assert [each["custom_id"] for each in answered] == [f"q{n}" for n in range(12)]

    play(scenario)
