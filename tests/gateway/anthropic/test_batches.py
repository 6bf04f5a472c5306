"""/v1/messages/batches: to the end, to errors, cancelled, expired, deleted, past a gateway's end, beside OpenAI's."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import httpx2
import pytest
from msgspec.structs import replace as with_field

from alignedserve.gateway.anthropic import batch_bodies
from alignedserve.gateway.anthropic.batches import KEPT_S, batch_body
from alignedserve.gateway.endpoints import ENDPOINTS
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.keys import owners_of
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.store import FileId, JobId, JobRecord, Problem, Tally
from alignedserve.store.redis_connection import RedisConnection
from alignedserve.store.redis_store import RedisStore
from alignedserve.store.scripts import PREFIX
from tests.gateway.batching import QUICK, System, gateway_on, play, questions
from tests.gateway.openai.test_batches import answer_first
from tests.gateway.scripted import MODEL
from tests.gateway.served import play as play_served
from tests.gateway.served import served
from tests.store.redis_process import redis_running

BATCHES = "/v1/messages/batches"
NO_BATCH = f"{BATCHES}/msgbatch_{'0' * 24}"
NONE = {"processing": 0, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}


def request(number: int, **params: Any) -> dict[str, Any]:
    asked = {
        "model": "demo",
        "max_tokens": 100,
        "messages": [{"role": "user", "content": f"How far is {number}?"}],
    }
    return {"custom_id": f"q{number}", "params": asked | params}


def requests(count: int) -> list[dict[str, Any]]:
    return [request(number) for number in range(count)]


async def create(http: httpx2.AsyncClient, asked: Sequence[Any]) -> dict[str, Any]:
    response = await http.post(BATCHES, json={"requests": asked})
    assert response.status_code == 200, response.text
    return dict(response.json())


async def ended(http: httpx2.AsyncClient, batch: dict[str, Any]) -> dict[str, Any]:
    while batch["processing_status"] != "ended":
        await asyncio.sleep(0.02)
        batch = (await http.get(f"{BATCHES}/{batch['id']}")).json()
    return batch


async def results(http: httpx2.AsyncClient, batch: dict[str, Any]) -> dict[str, dict[str, Any]]:
    response = await http.get(batch["results_url"])
    assert response.status_code == 200, response.text
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert all(line.keys() == {"custom_id", "result"} for line in lines)
    found = {line["custom_id"]: line["result"] for line in lines}
    assert len(found) == len(lines)
    return found


def test_each_request_has_its_result() -> None:
    async def scenario(at: System) -> None:
        http = at.gateway.http
        at.router.allowed = 0
        bad = [request(3, temperature=-1), request(4, stream=True), request(5, messages="x")]
        batch = await create(http, [*requests(3), *bad])
        assert (batch["type"], batch["processing_status"]) == ("message_batch", "in_progress")
        assert batch["id"].startswith("msgbatch_") and batch["request_counts"] == NONE | {"processing": 6}
        assert [
            batch[name] for name in ("ended_at", "results_url", "archived_at", "cancel_initiated_at")
        ] == [None] * 4
        created, expires = (datetime.fromisoformat(batch[name]) for name in ("created_at", "expires_at"))
        assert (expires - created).total_seconds() == 86400 and created.tzinfo
        response = await http.get(f"{BATCHES}/{batch['id']}/results")
        assert response.status_code == 400 and "before it has ended" in response.json()["error"]["message"]
        at.router.allow(None)
        batch = await ended(http, batch)
        assert batch["request_counts"] == NONE | {"succeeded": 3, "errored": 3} and batch["ended_at"]
        assert batch["results_url"] == f"{BATCHES}/{batch['id']}/results"
        found = await results(http, batch)
        assert found.keys() == {f"q{number}" for number in range(6)}
        for number in range(3):
            result = found[f"q{number}"]
            assert result.keys() == {"type", "message"} and result["type"] == "succeeded"
            assert result["message"]["type"] == "message"
            assert result["message"]["usage"]["service_tier"] == "batch"
            assert result["message"]["content"][0]["text"] == "one two three"
        for number, name in ((3, "temperature"), (4, "stream"), (5, "messages")):
            result = found[f"q{number}"]
            assert result.keys() == {"type", "error"} and result["type"] == "errored"
            assert result["error"]["type"] == "error"
            error = result["error"]["error"]
            assert error["type"] == "invalid_request_error" and name in error["message"]
        assert {submit.request.tier for submit in at.router.submitted} == {"be"}

    play(scenario)


@pytest.mark.slow
def test_a_cancelled_batch_says_of_each_request_what_became_of_it() -> None:
    async def scenario(at: System) -> None:
        http = at.gateway.http
        answer_first(at, 4)
        batch = await create(http, requests(10))
        await at.router.until(lambda: len(at.router.submitted) == 8)
        batch = (await http.post(f"{BATCHES}/{batch['id']}/cancel")).json()
        assert batch["processing_status"] in ("canceling", "ended") and batch["cancel_initiated_at"]
        batch = await ended(http, batch)
        assert batch["request_counts"] == NONE | {"succeeded": 4, "canceled": 6}
        found = await results(http, batch)
        assert [found[f"q{number}"]["type"] for number in range(4)] == ["succeeded"] * 4
        assert [found[f"q{number}"] for number in range(4, 10)] == [{"type": "canceled"}] * 6
        # again it changes nothing
        assert (await http.post(f"{BATCHES}/{batch['id']}/cancel")).json() == batch

    play(scenario, replace(QUICK, max_num_lines=4))


@pytest.mark.slow
def test_a_batch_that_is_cancelled_before_it_began_has_results_too() -> None:
    async def scenario(at: System) -> None:
        http = at.gateway.http
        at.router.allowed = 0
        await create(http, requests(1))
        await at.router.until(lambda: len(at.router.submitted) == 1)
        batch = await create(http, requests(3))
        batch = await ended(http, (await http.post(f"{BATCHES}/{batch['id']}/cancel")).json())
        assert batch["request_counts"] == NONE | {"canceled": 3}
        assert await results(http, batch) == {f"q{number}": {"type": "canceled"} for number in range(3)}
        assert len(at.router.submitted) == 1

    play(scenario, replace(QUICK, max_num_jobs=1))


@pytest.mark.slow
def test_what_has_no_answer_in_time_has_expired() -> None:
    async def scenario(at: System) -> None:
        http = at.gateway.http
        answer_first(at, 1)
        batch = await create(http, requests(3))
        await at.router.until(lambda: len(at.router.submitted) == 3)
        store = RedisStore(at.redis.url)
        while not (await store.tally(JobId(batch["id"]))).num_completed:
            await asyncio.sleep(0.02)
        # The gateway stops, and the next one finds that the deadline has passed.
        at.gateway.process.stop()
        job = await store.job(JobId(batch["id"]))
        assert job and await store.replace_job(job, with_field(job, expires_at=int(time.time())), None)
        await store.close()
        async with gateway_on(at.router_port, at.redis.url, name="gateway-1") as other:
            batch = await ended(other.http, (await other.http.get(f"{BATCHES}/{batch['id']}")).json())
            assert batch["request_counts"] == NONE | {"succeeded": 1, "expired": 2}
            found = await results(other.http, batch)
            assert found["q0"]["type"] == "succeeded"
            assert found["q1"] == found["q2"] == {"type": "expired"}
            response = await other.http.post(f"{BATCHES}/{batch['id']}/cancel")
            assert response.status_code == 400 and "it has ended" in response.text

    play(scenario)


@pytest.mark.slow
def test_another_gateway_goes_on_where_one_stopped() -> None:
    async def scenario(at: System) -> None:
        answer_first(at, 6)
        batch = await create(at.gateway.http, requests(20))
        await at.router.until(lambda: len(at.router.submitted) == 10)
        async with gateway_on(at.router_port, at.redis.url, name="gateway-1") as other:
            at.gateway.process.stop()
            answer_first(at, 1000)
            batch = await ended(other.http, (await other.http.get(f"{BATCHES}/{batch['id']}")).json())
            assert batch["request_counts"] == NONE | {"succeeded": 20}
            assert (await results(other.http, batch)).keys() == {f"q{number}" for number in range(20)}
            # what was answered was not asked again, what ran was
            assert len(at.router.submitted) == 24

    play(scenario, replace(QUICK, max_num_lines=4))


@pytest.mark.slow
def test_what_fails_again_and_again_is_the_servers_error() -> None:
    async def scenario(at: System) -> None:
        at.router.allowed = 0

        async def fail_for_ever() -> None:
            while True:
                await at.router.until(lambda: bool(at.router._open))
                at.router.fail("the logits are NaN")

        failing = asyncio.create_task(fail_for_ever())
        batch = await ended(at.gateway.http, await create(at.gateway.http, requests(1)))
        failing.cancel()
        result = (await results(at.gateway.http, batch))["q0"]
        assert (result["type"], result["error"]["error"]["type"]) == ("errored", "api_error")

    play(scenario)


@pytest.mark.slow
def test_only_a_batch_that_has_ended_is_deleted_and_nothing_is_left_of_it() -> None:
    async def scenario(at: System) -> None:
        http = at.gateway.http
        at.router.allowed = 0
        batch = await create(http, [request(0), request(1, top_p=2)])
        path = f"{BATCHES}/{batch['id']}"
        response = await http.delete(path)
        assert response.status_code == 400 and "has not ended" in response.json()["error"]["message"]
        at.router.allow(None)
        batch = await ended(http, batch)
        assert len((await http.get("/v1/files")).json()["data"]) == 3
        response = await http.delete(path)
        assert response.json() == {"id": batch["id"], "type": "message_batch_deleted"}
        for method, at_path in (("GET", path), ("GET", f"{path}/results"), ("DELETE", path)):
            response = await http.request(method, at_path)
            assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
        for listing in (BATCHES, "/v1/batches", "/v1/files"):
            assert (await http.get(listing)).json()["data"] == []
        store = RedisStore(at.redis.url)
        assert int(await store._redis.get(f"{PREFIX}bytes") or 0) == 0
        kept = [key.decode().removeprefix(PREFIX) for key in await store._redis.keys(f"{PREFIX}*")]
        # Its place in the list is known for a while, for those that are at it.
        place = f"place:{batch['id']}"
        assert [key for key in kept if batch["id"] in key] == [place]
        assert await store._redis.ttl(PREFIX + place) > 0
        assert not [key for key in kept if key.startswith(("jobs", "data", "file"))]
        await store.close()

    play(scenario)


@pytest.mark.slow
def test_openais_list_has_all_jobs_and_anthropics_its_own() -> None:
    async def scenario(at: System) -> None:
        http = at.gateway.http
        plain = await at.gateway.submit(questions(1))
        made = [(await create(http, requests(2)))["id"] for _ in range(3)]
        newest_first = made[::-1]
        for query, ids, has_more in [
            ("", newest_first, False),
            ("?limit=2", newest_first[:2], True),
            (f"?after_id={made[1]}", [made[0]], False),
            (f"?before_id={made[0]}", newest_first[:2], False),
            (f"?before_id={made[0]}&limit=1", [made[1]], True),
            (f"?before_id={made[2]}", [], False),
        ]:
            page = (await http.get(BATCHES + query)).json()
            assert ([each["id"] for each in page["data"]], page["has_more"]) == (ids, has_more), query
            assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
        for query, name in [
            (f"?after_id={plain.id}", "after_id"),
            (f"?before_id={NO_BATCH}", "before_id"),
            (f"?before_id={made[0]}&after_id={made[0]}", "before_id"),
            ("?limit=0", "limit"),
            ("?limit=1001", "limit"),
        ]:
            response = await http.get(BATCHES + query)
            assert response.status_code == 400 and response.json()["type"] == "error", query
            assert name in response.json()["error"]["message"]
        assert (await http.get(f"{BATCHES}/{plain.id}")).status_code == 404
        assert [each.id for each in (await at.client.batches.list()).data] == [*newest_first, plain.id]
        # OpenAI's routes describe it as any job.
        job = await at.gateway.until(await at.client.batches.retrieve(made[0]), "completed")
        assert job.endpoint == "/v1/messages" and job.request_counts and job.request_counts.completed == 2
        assert (await at.client.files.retrieve(job.input_file_id)).purpose == "batch"
        lines = await at.gateway.lines_of(job.output_file_id)
        assert [line["result"]["type"] for line in lines] == ["succeeded"] * 2
        await at.gateway.until(plain, "completed")

    play(scenario)


@pytest.mark.slow
def test_a_list_that_is_paged_goes_on_though_its_batches_are_deleted_and_takes_few_round_trips(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    call = RedisConnection.call

    async def noted(self: RedisConnection, asked: Any) -> Any:
        calls.append(asked)
        return await call(self, asked)

    async def scenario(at: System) -> None:
        http = at.gateway.http
        made = [(await ended(http, await create(http, requests(1))))["id"] for _ in range(4)]
        page = (await http.get(f"{BATCHES}?limit=2")).json()
        assert page["last_id"] == made[2] and page["has_more"]
        for each in made[2:]:
            assert (await http.delete(f"{BATCHES}/{each}")).status_code == 200
        page = (await http.get(f"{BATCHES}?limit=2&after_id={made[2]}")).json()
        assert [each["id"] for each in page["data"]] == made[1::-1] and not page["has_more"]
        page = (await http.get(f"{BATCHES}?limit=2&before_id={made[2]}")).json()
        assert page["data"] == []
        counts = dict.fromkeys((BATCHES, "/v1/batches"), 0)
        for path in counts:
            monkeypatch.setattr(RedisConnection, "call", noted)
            calls.clear()
            data = (await http.get(path)).json()["data"]
            names = [each.__qualname__ for each in calls]
            monkeypatch.setattr(RedisConnection, "call", call)
            assert [each["id"] for each in data] == made[1::-1]
            # The gateway's own calls come in between.
            counts[path] = sum(name.endswith((".page", ".jobs", ".job", ".tally")) for name in names)
        assert counts == {BATCHES: 2, "/v1/batches": 2}

    play(scenario)


@pytest.mark.slow
def test_results_that_are_gone_are_not_found() -> None:
    async def scenario(at: System) -> None:
        http = at.gateway.http
        batch = await ended(http, await create(http, requests(1)))
        job = await at.client.batches.retrieve(batch["id"])
        output = await at.client.files.retrieve(str(job.output_file_id))
        assert output.expires_at == output.created_at + KEPT_S
        await at.client.files.delete(output.id)
        response = await http.get(batch["results_url"])
        assert response.status_code == 404 and "results were deleted" in response.json()["error"]["message"]

    play(scenario)


@pytest.mark.slow
def test_a_batch_that_failed_has_no_results_and_only_errors() -> None:
    async def scenario(at: System) -> None:
        http = at.gateway.http
        at.router.allowed = 0
        batch = await create(http, requests(3))
        await at.router.until(lambda: len(at.router.submitted) == 3)
        store = RedisStore(at.redis.url)
        job = await store.job(JobId(batch["id"]))
        assert job
        why = [Problem("file_gone", "its input file is gone")]
        assert await store.replace_job(job, with_field(job, status="failed", failed_at=1, problems=why), None)
        await store.close()
        batch = await ended(http, batch)
        assert batch["ended_at"] and batch["results_url"] is None
        assert batch["request_counts"] == NONE | {"errored": 3}
        response = await http.get(f"{BATCHES}/{batch['id']}/results")
        assert response.status_code == 404
        assert "failed, and has no results: its input file is gone" in response.json()["error"]["message"]

    play(scenario)


def test_the_counts_of_a_batch_that_failed_add_up() -> None:
    job = JobRecord(
        id=JobId("msgbatch_1"),
        endpoint="/v1/messages",
        input_file_id=FileId("file-1"),
        completion_window="24h",
        created_at=1,
        expires_at=2,
        status="failed",
        failed_at=int(time.time()),
        num_lines=5,
    )
    found = batch_body(job, Tally(num_completed=3, num_failed=1, num_cancelled=1))
    assert found["request_counts"] == NONE | {"errored": 5} and found["results_url"] is None


def test_results_are_archived_when_they_are_no_longer_kept() -> None:
    now = int(time.time())
    job = JobRecord(
        id=JobId("msgbatch_1"),
        endpoint="/v1/messages",
        input_file_id=FileId("file-1"),
        completion_window="24h",
        created_at=now - KEPT_S,
        expires_at=now,
        status="completed",
        completed_at=now - KEPT_S + 100,
        num_lines=1,
    )
    kept = batch_body(job, Tally(1))
    assert kept["results_url"] and kept["archived_at"] is None
    gone = batch_body(with_field(job, completed_at=now - KEPT_S - 100), Tally(1))
    assert gone["results_url"] is None
    assert datetime.fromisoformat(gone["archived_at"]).timestamp() == now - 100


# what is sent, and what the message says
WRONG: list[tuple[list[Any], str]] = [
    ([], "requests: List should have at least 1 item"),
    ([{"custom_id": "a"}], "requests.0.params: Field required"),
    ([request(0) | {"custom_id": 7}], "requests.0.custom_id"),
    ([request(0) | {"params": []}], "requests.0.params"),
    ([request(0) | {"custom_id": ""}], "requests.0: custom_id: must have 1 to"),
    ([request(0), request(1), request(0)], "requests.2: custom_id='q0'"),
    ([request(0), request(1, model="other")], "requests.1: model='other'"),
    ([request(0, model="other")], "requests.0: model='other': does not exist"),
    ([request(0, model=7)], "requests.0: model: must be a string"),
    ([request(0, temperature=float("nan"))], "requests.0: not JSON"),
    ([request(0, system="\ud800")], "requests.0: not JSON"),
    ([request(0) | {"custom_id": "\ud800"}], "requests.0: not JSON"),
    ([request(0, system="x" * (9 << 20))], "requests.0: the line is longer"),
]


@pytest.mark.parametrize(("asked", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_can_not_be_a_batch_is_refused_by_name(asked: list[Any], message: str) -> None:
    with pytest.raises(ApiError) as raised:
        ENDPOINTS[BATCHES].prepare(json.dumps({"requests": asked}).encode(), MODEL, CallLimits())
    assert raised.value.status == 400 and raised.value.message.startswith(message)


def test_numbers_that_become_longer_count_as_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_bodies, "MAX_INPUT_BYTES", 0)
    limits = CallLimits(max_body_bytes=4000)
    asked = [f'{{"custom_id":"{n}","params":{{"a":[{",".join(["1E15"] * 200)}]}}}}' for n in range(3)]
    for count in (1, 2, 3):
        body = f'{{"requests":[{",".join(asked[:count])}]}}'.encode()
        assert len(body) < limits.max_body_bytes
        if count < 3:
            made: Any = ENDPOINTS[BATCHES].prepare(body, MODEL, limits)
            assert count * 200 * len("1000000000000000.0") < len(made.body) <= 8000
            continue
        with pytest.raises(ApiError, match="more than 8000 bytes") as raised:
            ENDPOINTS[BATCHES].prepare(body, MODEL, limits)
        assert raised.value.status == 413


def test_depth_is_the_clients_error_wherever_it_is_found() -> None:
    for depth in (10, 400, 900, 950, *range(970, 1000), 1100, 100_000):
        params = '{"a":' + "[" * depth + "]" * depth + "}"
        body = f'{{"requests":[{{"custom_id":"a","params":{params}}}]}}'.encode()
        try:
            ENDPOINTS[BATCHES].prepare(body, MODEL, CallLimits())
        except ApiError as error:
            assert error.status == 400 and depth > 100


def test_a_request_is_stored_as_it_was_sent() -> None:
    asked = [request(0, system="é \u2028 \n \U0001f600", top_k=10**40, temperature=0.1)]
    made: Any = ENDPOINTS[BATCHES].prepare(json.dumps({"requests": asked}).encode(), MODEL, CallLimits())
    assert (made.num_lines, made.model, made.ignored) == (1, "demo", [])
    (line,) = bytes(made.body).split(b"\n")[:-1]
    found = json.loads(line)
    assert found == {"custom_id": "q0", "method": "POST", "url": "/v1/messages", "body": asked[0]["params"]}
    assert "é".encode() in line and "\U0001f600".encode() in line


@pytest.mark.slow
def test_large_bodies_are_read_elsewhere_and_refusals_are_anthropics() -> None:
    async def scenario(at: System) -> None:
        http = at.gateway.http
        for count in (1, 300):
            response = await http.post(BATCHES, json={"requests": [*requests(count), request(0)], "newer": 1})
            error = response.json()
            assert response.status_code == 400 and error["type"] == "error"
            assert f"requests.{count}: custom_id='q0'" in error["error"]["message"]
        assert (await http.get("/v1/files")).json()["data"] == []
        response = await http.post(BATCHES, json={"requests": requests(300), "newer": 1})
        assert response.headers["x-ignored-parameters"] == "newer"
        batch = await ended(http, response.json())
        assert batch["request_counts"] == NONE | {"succeeded": 300}
        assert (await results(http, batch)).keys() == {f"q{number}" for number in range(300)}

    play(scenario)


KEYS = {"one": {"x-api-key": "one"}, "other": {"x-api-key": "other"}}


@pytest.mark.slow
def test_another_keys_batch_is_as_if_it_were_not_there_and_limits_hold() -> None:
    async def scenario() -> None:
        limits = CallLimits(max_open_batches_per_key=1)
        owners = owners_of(["one", "other"], None)
        async with (
            redis_running() as redis,
            served(store_url=redis.url, key_owners=owners, limits=limits) as at,
        ):
            at.router.allowed = 0
            body = {"requests": requests(1)}
            made = (await at.http.post(BATCHES, json=body, headers=KEYS["one"])).json()
            refused = await at.http.post(BATCHES, json=body, headers=KEYS["one"])
            assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
            # nothing is left of the one that was refused
            assert len((await at.http.get("/v1/files", headers=KEYS["one"])).json()["data"]) == 1
            for method, suffix in (("GET", ""), ("GET", "/results"), ("POST", "/cancel"), ("DELETE", "")):
                others, nobodys = [
                    await at.http.request(method, path + suffix, headers=KEYS["other"])
                    for path in (f"{BATCHES}/{made['id']}", NO_BATCH)
                ]
                assert others.status_code == nobodys.status_code == 404
                own, none = made["id"], NO_BATCH.rpartition("/")[2]
                assert others.text.replace(own, none) == nobodys.text
            assert (await at.http.get(BATCHES, headers=KEYS["other"])).json()["data"] == []
            assert len((await at.http.get(BATCHES, headers=KEYS["one"])).json()["data"]) == 1

    play_served(scenario)
