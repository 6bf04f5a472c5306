"""Who may ask, how much, and how many at once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from alignedserve.gateway.config import HttpConfig
from alignedserve.gateway.http.keys import ANYONE, Keys, digest_of, owners_of
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.launch.settings import Settings, settings_of
from alignedserve.protocol.messages import Drain
from alignedserve.router.config import RouterConfig
from tests.gateway.scripted import ScriptedRouter
from tests.gateway.served import GATEWAY, JSON, play, served

KEYED: dict[str, Any] = {"key_owners": owners_of(["secret", "other"], None)}


# ---- keys ----


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        "Bearer secre",
        "Bearer secret2",
        "Basic secret",
        "secret",
    ],
)
def test_without_a_key_there_is_nothing_but_health_and_the_page(authorization: str | None) -> None:
    async def scenario() -> None:
        async with served(**KEYED) as at:
            headers = {} if authorization is None else {"authorization": authorization}
            await at.router.until(lambda: list(at.router.hub) != [])
            for path in ("/health", "/", "/page/main.js"):
                assert (await at.http.get(path, headers=headers)).status_code == 200
            for method, path in [
                ("POST", "/v1/completions"),
                ("POST", "/v1/chat/completions"),
                ("POST", "/tokenize"),
                ("GET", "/v1/models"),
                ("GET", "/v1/cluster"),
                ("GET", "/docs"),
                ("GET", "/openapi.json"),
                ("GET", "/nothing"),
                ("OPTIONS", "/v1/models"),
                ("OPTIONS", "/health"),
                ("POST", "/health"),
                ("GET", "/health/"),
                ("POST", "/"),
                ("GET", "/page"),
                ("GET", "/page/main.js/x"),
                ("GET", "/health/../v1/models"),
                ("GET", "//health"),
                ("GET", "/health%2f..%2fv1/models"),
                ("GET", "/v1/models?path=/health"),
            ]:
                # whole, or `//health` would be a host
                response = await at.http.request(method, f"{at.http.base_url}{path}", headers=headers)
                assert response.status_code == 401, path
                error = response.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
            assert at.router.submitted == []

    play(scenario)


def test_each_key_opens_everything() -> None:
    async def scenario() -> None:
        async with served(**KEYED) as at:
            for key in ("secret", "other"):
                client = at.client.with_options(api_key=key)
                assert (await client.completions.create(model="demo", prompt="x")).choices[0].text
                headers = {"authorization": f"bearer {key}"}
                assert (await at.http.get("/nothing", headers=headers)).status_code == 404
                assert (await at.http.get("/openapi.json", headers=headers)).status_code == 200
            with pytest.raises(openai.AuthenticationError):
                await at.client.completions.create(model="demo", prompt="x")

    play(scenario)


def test_keys_of_windows_and_tabs_before_groups_are_read(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"# ours\r\n\r\nfirst\r\nsecond\tteam\r\n")
    assert owners_of([], str(file)) == owners_of(["first"], None) | {digest_of("second"): "group:team"}


def test_a_key_is_looked_up_and_not_compared_with_all() -> None:
    """Equality is never asked of a digest of another key, however many there are."""

    class Digest(bytes):
        num_compared = 0

        def __eq__(self, other: object) -> bool:
            Digest.num_compared += 1
            return super().__eq__(other)

        __hash__ = bytes.__hash__

    keys = Keys({Digest(digest): owner for digest, owner in owners_of(map(str, range(2000)), None).items()})
    Digest.num_compared = 0
    assert keys.owner("Bearer 1999") and keys.owner("Bearer unknown") is None
    assert Digest.num_compared <= 20


def test_keys_come_from_the_command_line_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\nfirst\n  second  \n")
    assert list(owners_of(["third", "first"], str(file))) == list(
        map(digest_of, ("third", "first", "second"))
    )
    assert Keys().owner(None) == ANYONE
    keys = Keys(owners_of([], str(file)))
    assert keys.owner("Bearer second") not in (None, keys.owner("Bearer first"))
    file.write_text("# none\n")
    for given, path, message in (
        ([], str(file), "holds no key"),
        ([], str(tmp_path / "gone"), "can't be read"),
        (["two words"], None, "printable ASCII"),
        ([""], None, "printable ASCII"),
    ):
        with pytest.raises(ValueError, match=message):
            owners_of(given, path)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])  # noqa: S104
def test_nobody_listens_to_the_world_without_keys_by_mistake(host: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"host={host!r}: reachable from other machines")):
        listening_on(host)
    listening_on(host, api_key=("k",))
    listening_on(host, api_key_file="/keys")
    listening_on(host, allow_no_auth=True)


def listening_on(host: str, **options: object) -> Settings:
    return settings_of(None, {"host": host, **options})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_on_this_machine_no_keys_are_needed(host: str) -> None:
    assert "sesame" not in repr(listening_on(host, api_key=("sesame",)))
    listening_on(host)


# ---- browsers ----

PREFLIGHT = {
    "Origin": "https://a.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


@pytest.mark.parametrize("allowed", ["https://a.example", "*"])
def test_a_page_of_an_allowed_origin_may_call(allowed: str) -> None:
    async def scenario() -> None:
        async with served(allowed_origins=("https://b.example", allowed), **KEYED) as at:
            before = await at.http.options("/v1/completions", headers=PREFLIGHT)
            assert before.status_code == 200
            assert before.headers["access-control-allow-origin"] == allowed
            assert "POST" in before.headers["access-control-allow-methods"]
            assert before.headers["access-control-allow-headers"] == "authorization, content-type"
            for key, status in (("secret", 200), ("wrong", 401)):
                headers = {"Origin": "https://a.example", "Authorization": f"Bearer {key}"}
                called = await at.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
                assert called.status_code == status
                assert called.headers["access-control-allow-origin"] == allowed
                assert "access-control-allow-credentials" not in called.headers

    play(scenario)


@pytest.mark.parametrize(("allowed", "status"), [((), 401), (("https://b.example",), 400)])
def test_a_page_of_another_origin_may_not(allowed: tuple[str, ...], status: int) -> None:
    async def scenario() -> None:
        async with served(allowed_origins=allowed, **KEYED) as at:
            before = await at.http.options("/v1/completions", headers=PREFLIGHT)
            assert before.status_code == status
            headers = {"Origin": "https://a.example", "Authorization": "Bearer secret"}
            called = await at.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            for answer in (before, called):
                assert "access-control-allow-origin" not in answer.headers

    play(scenario)


@pytest.mark.parametrize("origin", ["", "example.org", "https://example.org/", "https://", "**"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"allowed_origins={origin!r}: must be")):
        HttpConfig(allowed_origins=("https://example.org:8080", "*", origin))


# ---- caps ----


@pytest.mark.parametrize(
    ("limits", "body", "param", "message"),
    [
        (CallLimits(max_choices=4), {"prompt": ["x"] * 3, "n": 2}, "n", "at most 4 choices"),
        (CallLimits(max_choices=4), {"prompt": "x", "n": 1, "best_of": 5}, "best_of", "at most 4 choices"),
        (CallLimits(max_choices=4), {"prompt": ["x"] * 5}, "prompt", "prompt: 5 prompts; at most 4"),
        (
            CallLimits(max_token_ids=2),
            {"prompt": "x", "stop_token_ids": [5] * 3},
            "stop_token_ids",
            "at most 2",
        ),
        (
            CallLimits(max_token_ids=2),
            {"prompt": "x", "logit_bias": {"5": 1, "6": 1, "7": 1}},
            "logit_bias",
            "at most 2",
        ),
        (CallLimits(max_logprobs=2), {"prompt": "x", "logprobs": 3}, "logprobs", "at most 2"),
        (CallLimits(max_stop_strings=1), {"prompt": "x", "stop": ["a", "b"]}, "stop", "at most 1 are"),
        (CallLimits(max_stop_chars=3), {"prompt": "x", "stop": "abcd"}, "stop", "at most 3 are"),
        (CallLimits(max_prompt_tokens=4), {"prompt": [5] * 5}, "prompt", "prompt: 5 tokens; at most 4"),
    ],
)
def test_what_is_too_much_is_named(
    limits: CallLimits, body: dict[str, Any], param: str, message: str
) -> None:
    async def scenario() -> None:
        async with served(limits=limits) as at:
            response = await at.post("/v1/completions", body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
            assert message in response.json()["error"]["message"]
            assert at.router.submitted == []

    play(scenario)


def test_limits_are_positive() -> None:
    with pytest.raises(ValueError, match="max_choices=0: must be greater than 0"):
        CallLimits(max_choices=0)


@pytest.mark.parametrize("is_announced", [True, False])
@pytest.mark.parametrize("num_bytes", [3000, 3_000_000])
def test_a_body_that_is_too_large_is_413(is_announced: bool, num_bytes: int) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(num_bytes // 1000):
            yield b" " * 1000

    async def scenario() -> None:
        async with served(limits=CallLimits(max_body_bytes=2000)) as at:
            content = b" " * num_bytes if is_announced else chunks()
            response = await at.http.post("/v1/completions", content=content, headers=JSON)
            assert response.status_code == 413
            assert "at most 2000 bytes" in response.json()["error"]["message"]
            assert (await at.post("/v1/completions", {"prompt": "x"})).status_code == 200

    play(scenario)


def test_a_key_has_so_many_requests_open_and_no_more() -> None:
    async def scenario() -> None:
        async with served(limits=CallLimits(max_requests_per_key=2), **KEYED) as at:
            at.router.allow(0)

            async def ask(key: str) -> httpx2.Response:
                headers = {"authorization": f"Bearer {key}"}
                return await at.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)

            asking = [asyncio.create_task(ask("secret")) for _ in range(2)]
            await at.router.until(lambda: len(at.router.submitted) == 2)
            refused = await ask("secret")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            others = asyncio.create_task(ask("other"))
            await at.router.until(lambda: len(at.router.submitted) == 3)
            # who leaves makes room
            asking.pop().cancel()
            await at.router.until(lambda: len(at.router.aborted) == 1)
            at.router.allow(None)
            assert (await others).status_code == (await asking.pop()).status_code == 200
            assert (await ask("secret")).status_code == 200

    play(scenario)


def test_each_choice_of_a_call_counts() -> None:
    async def scenario() -> None:
        async with served(limits=CallLimits(max_requests_per_key=8), **KEYED) as at:
            at.router.allow(0)

            async def ask(key: str, n: int) -> httpx2.Response:
                headers = {"authorization": f"Bearer {key}"}
                return await at.http.post(
                    "/v1/completions", json={"prompt": ["x", "y"], "n": n}, headers=headers
                )

            asking = asyncio.create_task(ask("secret", 3))
            await at.router.until(lambda: len(at.router.submitted) == 6)
            refused = await ask("secret", 2)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert "max_requests_per_key=8" in refused.json()["error"]["message"]
            others = [asyncio.create_task(ask("secret", 1)), asyncio.create_task(ask("other", 4))]
            await at.router.until(lambda: len(at.router.submitted) == 16)
            at.router.allow(None)
            assert [(await each).status_code for each in (asking, *others)] == [200, 200, 200]
            assert (await ask("secret", 4)).status_code == 200

    play(scenario)


def test_each_input_of_an_embedding_counts() -> None:
    async def scenario() -> None:
        async with served(limits=CallLimits(max_requests_per_key=4), **KEYED) as at:
            at.router.allow(0)
            headers = {"authorization": "Bearer secret"}

            async def ask(path: str, **body: Any) -> httpx2.Response:
                return await at.http.post(path, json=body, headers=headers)

            asking = asyncio.create_task(ask("/v1/embeddings", input=["x", "y", "z"]))
            await at.router.until(lambda: len(at.router.submitted) == 3)
            assert (await ask("/v1/embeddings", input=["x", "y"])).status_code == 429
            assert (await ask("/v1/score", text_1="x", text_2="y")).status_code == 429
            asking.cancel()

    play(scenario)


def test_a_call_that_is_always_too_large_is_not_to_be_repeated() -> None:
    async def scenario() -> None:
        async with served(limits=CallLimits(max_requests_per_key=4), **KEYED) as at:
            headers = {"authorization": "Bearer secret"}
            refused = await at.http.post(
                "/v1/completions", json={"prompt": ["x"] * 5, "n": 1}, headers=headers
            )
            assert refused.status_code == 400 and "retry-after" not in refused.headers
            assert "max_requests_per_key=4" in refused.json()["error"]["message"]

    play(scenario)


def test_a_key_can_not_fill_the_queue_of_the_router() -> None:
    assert CallLimits().max_requests(needs_keys=True) == RouterConfig().max_num_queued_reqs // 2
    assert CallLimits().max_requests() == RouterConfig().max_num_queued_reqs
    assert CallLimits(max_requests_per_key=9).max_requests(needs_keys=True) == 9


def test_without_keys_all_clients_together_have_so_many_requests_open() -> None:
    async def scenario() -> None:
        async with served(limits=CallLimits(max_requests_per_key=1)) as at:
            at.router.allow(0)
            asking = asyncio.create_task(at.post("/v1/completions", {"prompt": "x"}))
            await at.router.until(lambda: len(at.router.submitted) == 1)
            refused = await at.post("/v1/completions", {"prompt": "x"})
            assert refused.status_code == 429
            message = refused.json()["error"]["message"]
            assert "of this API key" not in message and "of all clients together" in message
            # Looking at the server, and ending what it does, is possible all the time.
            for method, path, code in (
                ("GET", "/health", 200),
                ("GET", "/metrics", 200),
                ("GET", "/v1/models", 200),
                ("POST", "/v1/responses/resp_x/cancel", 404),
                ("DELETE", "/v1/responses/resp_x", 404),
            ):
                assert (await at.http.request(method, path)).status_code == code, path
            at.router.allow(None)
            assert (await asking).status_code == 200
            described = (await at.http.get("/openapi.json")).json()["paths"]["/v1/completions"]["post"]
            assert "of all clients together" in described["responses"]["429"]["description"]

    play(scenario)


# ---- the end ----


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_runs_finishes_and_what_comes_is_refused(is_stream: bool) -> None:
    async def scenario() -> None:
        async with served() as at:
            at.router.allow(2)
            body = {"prompt": "x", "max_tokens": 50, "stream": is_stream}
            asking = asyncio.create_task(at.post("/v1/completions", body))
            await at.router.until(lambda: len(at.router.submitted) == 1)
            at.router.hub.send(GATEWAY, Drain())
            async with asyncio.timeout(20):
                while (health := await at.http.get("/health")).status_code == 200:
                    pass
            assert (health.status_code, health.json()["reason"]) == (503, "this server is stopping")
            refused = await at.post("/v1/completions", {"prompt": "y"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["message"] == "this server is stopping"
            at.router.allow(None)
            response = await asking
            assert response.status_code == 200 and '"finish_reason":"stop"' in response.text
            # and then it ends by itself
            await at.router.until(lambda: list(at.router.hub) == [])
            assert len(at.router.submitted) == 1 and at.router.aborted == []

    play(scenario)


@pytest.mark.parametrize("is_hurried", [False, True])
def test_what_does_not_finish_in_time_is_told(is_hurried: bool) -> None:
    async def scenario() -> None:
        async with served(shutdown_timeout=600.0 if is_hurried else 0.05) as at:
            at.router.allow(2)
            stream = await at.client.completions.create(model="demo", prompt="x", max_tokens=50, stream=True)
            await anext(stream)
            at.process.ending.drain()
            if is_hurried:
                at.process.stop()
            with pytest.raises(openai.APIError, match="this server is stopping"):
                async for _ in stream:
                    pass
            await at.router.until(lambda: list(at.router.hub) == [])

    play(scenario)


def test_an_idle_server_stops_at_once() -> None:
    async def scenario() -> None:
        async with served(ScriptedRouter(), shutdown_timeout=600.0) as at:
            await at.router.until(lambda: list(at.router.hub) != [])
            at.process.ending.drain()
            await at.router.until(lambda: list(at.router.hub) == [])

    play(scenario)


# ---- what a proxy in front may read otherwise ----


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([("Authorization", "Bearer secret"), ("Authorization", "Bearer other")], 400),
        ([("Authorization", "Bearer wrong"), ("Authorization", "Bearer secret")], 400),
        ([("Authorization", "Bearer secret"), ("x-api-key", "other")], 400),
        ([("x-api-key", "secret"), ("x-api-key", "other")], 400),
        ([("Authorization", "Bearer secret"), ("x-api-key", "secret")], 200),
        ([("Authorization", "secret"), ("x-api-key", "secret")], 400),
        ([("Authorization", "Basic secret"), ("x-api-key", "secret")], 400),
        ([("Authorization", ""), ("x-api-key", "secret")], 200),
        ([("Authorization", "Bearer"), ("x-api-key", "secret")], 200),
        ([("Authorization", "Bearer secret"), ("x-api-key", "")], 200),
        ([("Authorization", "bearer  secret"), ("x-api-key", "secret")], 200),
        ([("Authorization", "BEARER secret"), ("Authorization", "Bearer secret")], 200),
        ([("Authorization", "bearer other"), ("x-api-key", "secret")], 400),
        ([("x-api-key", "")], 401),
    ],
)
def test_a_request_has_one_key(headers: list[tuple[str, str]], code: int) -> None:
    async def scenario() -> None:
        async with served(**KEYED) as at:
            answer = await at.http.get("/v1/models", headers=headers)
            assert answer.status_code == code
            if code == 400:
                assert "several API keys" in answer.json()["error"]["message"]

    play(scenario)


def test_without_keys_nothing_depends_on_them() -> None:
    async def scenario() -> None:
        async with served() as at:
            headers = {"Authorization": "Bearer a", "x-api-key": "b"}
            assert (await at.http.get("/v1/models", headers=headers)).status_code == 200

    play(scenario)
