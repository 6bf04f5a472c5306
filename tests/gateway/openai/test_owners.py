"""Files and batches belong to a key or its group, and other keys learn nothing about them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from alignedserve.gateway.http.keys import Keys, digest_of, owners_of
from alignedserve.gateway.limits.limits import CallLimits
from tests.gateway.batching import CHATS, jsonl, questions
from tests.gateway.served import Served, play, served
from tests.store.redis_process import redis_running

OWNERS = owners_of(["alone"], None) | {digest_of("one"): "group:team", digest_of("two"): "group:team"}
NO_FILE = "file-" + "0" * 24
NO_BATCH = "batch_" + "0" * 24


@asynccontextmanager
async def keyed(**settings: Any) -> AsyncIterator[Served]:
    async with redis_running() as redis, served(store_url=redis.url, key_owners=OWNERS, **settings) as at:
        await at.router.until(lambda: list(at.router.hub) != [])
        yield at


async def ask(at: Served, key: str, method: str, path: str, **options: Any) -> httpx2.Response:
    return await at.http.request(method, path, headers={"authorization": f"Bearer {key}"}, **options)


async def upload(at: Served, key: str, content: bytes) -> httpx2.Response:
    form = {"purpose": (None, b"batch"), "file": ("in.jsonl", content)}
    return await ask(at, key, "POST", "/v1/files", files=form)


async def submit(at: Served, key: str, file_id: str) -> httpx2.Response:
    asked = {"input_file_id": file_id, "endpoint": CHATS, "completion_window": "24h"}
    return await ask(at, key, "POST", "/v1/batches", json=asked)


async def completed(at: Served, key: str, batch_id: str) -> dict[str, Any]:
    while True:
        batch: dict[str, Any] = (await ask(at, key, "GET", f"/v1/batches/{batch_id}")).json()
        if batch["status"] == "completed":
            return batch
        assert batch["status"] in ("validating", "in_progress", "finalizing"), batch
        await asyncio.sleep(0.02)


async def ids(at: Served, key: str, path: str) -> list[str]:
    return [each["id"] for each in (await ask(at, key, "GET", path)).json()["data"]]


def test_another_ones_is_as_if_it_were_not_there() -> None:
    async def scenario() -> None:
        async with keyed() as at:
            file_id = (await upload(at, "one", jsonl(questions(2)))).json()["id"]
            batch_id = (await submit(at, "one", file_id)).json()["id"]
            output_id = (await completed(at, "one", batch_id))["output_file_id"]
            for method, path, own, none in [
                ("GET", "/v1/files/{}", file_id, NO_FILE),
                ("GET", "/v1/files/{}/content", file_id, NO_FILE),
                ("GET", "/v1/files/{}/content", output_id, NO_FILE),
                ("DELETE", "/v1/files/{}", output_id, NO_FILE),
                ("GET", "/v1/batches/{}", batch_id, NO_BATCH),
                ("POST", "/v1/batches/{}/cancel", batch_id, NO_BATCH),
                ("GET", "/v1/files?after={}", file_id, NO_FILE),
                ("GET", "/v1/batches?after={}", batch_id, NO_BATCH),
            ]:
                others = await ask(at, "alone", method, path.format(own))
                nobodys = await ask(at, "alone", method, path.format(none))
                assert others.status_code == nobodys.status_code in (400, 404), path
                assert others.text.replace(own, none) == nobodys.text
            refused = [await submit(at, "alone", each) for each in (file_id, NO_FILE)]
            assert [each.status_code for each in refused] == [400, 400]
            assert refused[0].text.replace(file_id, NO_FILE) == refused[1].text
            assert await ids(at, "alone", "/v1/files") == await ids(at, "alone", "/v1/batches") == []
            # the other key of the group has it all
            assert await ids(at, "two", "/v1/files") == [output_id, file_id]
            assert await ids(at, "two", "/v1/batches") == [batch_id]
            assert (await ask(at, "two", "GET", f"/v1/files/{output_id}/content")).status_code == 200
            assert (await ask(at, "two", "DELETE", f"/v1/files/{output_id}")).status_code == 200

    play(scenario)


def test_another_ones_item_is_none_to_refer_to() -> None:
    async def scenario() -> None:
        async with keyed() as at:
            body = {"items": [{"role": "user", "content": "Hello."}]}
            made = await ask(at, "one", "POST", "/v1/conversations", json=body)
            answered = await ask(at, "one", "POST", "/v1/responses", json={"input": "x"})
            names = [
                *await ids(at, "one", f"/v1/conversations/{made.json()['id']}/items"),
                *await ids(at, "one", f"/v1/responses/{answered.json()['id']}/input_items"),
                answered.json()["output"][0]["id"],
            ]
            assert len(names) == 3
            for name in names:
                input_items = {"input": [{"type": "item_reference", "id": name}]}
                others = await ask(at, "alone", "POST", "/v1/responses", json=input_items)
                none = name[:8] + "0" * (len(name) - 8)
                nobodys = await ask(
                    at,
                    "alone",
                    "POST",
                    "/v1/responses",
                    json={"input": [{"type": "item_reference", "id": none}]},
                )
                assert others.status_code == nobodys.status_code == 400
                assert others.text.replace(name, none) == nobodys.text
                groups = await ask(at, "two", "POST", "/v1/responses", json=input_items)
                assert groups.status_code == 200, groups.text

    play(scenario)


def test_another_ones_conversation_is_as_if_it_were_not_there() -> None:
    async def scenario() -> None:
        async with keyed() as at:
            hello = {"role": "user", "content": "Hello.", "id": "msg_1"}
            body = {"items": [hello], "metadata": {"a": "b"}}
            made = await ask(at, "one", "POST", "/v1/conversations", json=body)
            own, none = made.json()["id"], "conv_none"
            one, response = f"/v1/conversations/{own}", {"model": "demo", "input": "x", "conversation": own}
            calls: list[tuple[str, str, Any]] = [
                ("GET", one, None),
                ("POST", one, {"metadata": {}}),
                ("GET", f"{one}/items", None),
                ("POST", f"{one}/items", {"items": [hello]}),
                ("GET", f"{one}/items/msg_1", None),
                ("DELETE", f"{one}/items/msg_1", None),
                ("POST", "/v1/responses", response),
                ("POST", "/v1/responses", response | {"store": False}),
                ("POST", "/v1/responses", response | {"background": True}),
                ("POST", "/v1/responses/input_tokens", response),
                ("DELETE", one, None),
            ]
            for method, path, given in calls:
                others = await ask(at, "alone", method, path, json=given)
                sent = None if given is None else {**given}
                if sent and "conversation" in sent:
                    sent["conversation"] = none
                nobodys = await ask(at, "alone", method, path.replace(own, none), json=sent)
                assert others.status_code == nobodys.status_code == 404, path
                assert others.text.replace(own, none) == nobodys.text
            # it is as it was, and the other key of the group has it
            assert (await ask(at, "two", "GET", one)).json() == made.json()
            assert await ids(at, "two", f"{one}/items") == ["msg_1"]
            for method, path, given in calls:
                assert (await ask(at, "two", method, path, json=given)).status_code == 200, path

    play(scenario)


def test_all_is_shared_where_that_is_asked_for() -> None:
    async def scenario() -> None:
        async with keyed(shared_files=True) as at:
            file_id = (await upload(at, "one", jsonl(questions(1)))).json()["id"]
            batch_id = (await submit(at, "alone", file_id)).json()["id"]
            output_id = (await completed(at, "one", batch_id))["output_file_id"]
            for key in ("one", "two", "alone"):
                assert await ids(at, key, "/v1/files") == [output_id, file_id]
                assert await ids(at, key, "/v1/batches") == [batch_id]

    play(scenario)


def test_limits_are_each_owners_own() -> None:
    limits = CallLimits(max_open_batches=3, max_open_batches_per_key=2, max_stored_bytes_per_key=10_000)

    async def scenario() -> None:
        async with keyed(limits=limits) as at:
            at.router.allowed = 0
            file_id = (await upload(at, "one", jsonl(questions(1)))).json()["id"]
            for key in ("one", "two"):
                assert (await submit(at, key, file_id)).status_code == 200
            refused = await submit(at, "one", file_id)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (429, "too_many_batches")
            assert "you have 2 open batches" in error["message"]
            own = (await upload(at, "alone", jsonl(questions(1)))).json()["id"]
            assert (await submit(at, "alone", own)).status_code == 200
            refused = await submit(at, "alone", own)
            assert refused.status_code == 429 and "there are 3 open batches" in refused.text
            # bytes: the whole upload is refused, and nothing of it is left
            before = await ids(at, "alone", "/v1/files")
            refused = await upload(at, "alone", b"x" * 10_001)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (413, "storage_full")
            assert await ids(at, "alone", "/v1/files") == before
            assert (await upload(at, "alone", b"x" * 5000)).status_code == 200

    play(scenario)


def test_a_line_of_the_file_is_a_key_and_perhaps_its_group(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst\n  second  team \nthird\tteam\n")
    keys = Keys(owners_of(["fourth"], str(file)))
    first, second, third, fourth = [
        keys.owner(f"Bearer {key}") for key in ("first", "second", "third", "fourth")
    ]
    assert second == third == "group:team"
    assert len({first, second, fourth}) == 3 and first and first.startswith("key:")
    assert keys.owner("Bearer team") is None and keys.owner("Bearer second team") is None
    for text, message in (("a b c\n", "the name of its group"), ("a b\na c\n", "in two groups")):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            owners_of([], str(file))
