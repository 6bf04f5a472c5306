"""Which pages may make a browser ask: by name, and in front of a real gateway."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from starlette.datastructures import Headers

from alignedserve.gateway.config import HttpConfig
from alignedserve.gateway.http.access import ANY_CALLER, Callers, callers_of
from tests.gateway.http.test_access import KEYED
from tests.gateway.served import JSON, play, served

HERE = callers_of(("127.0.0.1", "127.0.0.1"), (), (), False)
EVERYWHERE = callers_of(("0.0.0.0", "0.0.0.0"), (), (), False)  # noqa: S104
ELSEWHERE = callers_of(("gpu.example", "10.0.0.5"), (), (), False)
EVIL = "http://evil.example"


def status_of(callers: Callers, method: str = "GET", **headers: str) -> int:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    refusal = callers.refusal(method, Headers(given))
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize(
    ("callers", "known", "unknown"),
    [
        (
            HERE,
            [
                "127.0.0.1",
                "127.0.0.1:8000",
                "127.0.0.2",
                "localhost",
                "LOCALHOST:9",
                "localhost.",
                "[::1]:8000",
            ],
            ["evil.example", "10.0.0.5", "0.0.0.1", "localhost.evil.example", socket.gethostname() + "x"],
        ),
        (
            EVERYWHERE,
            ["127.0.0.1", "localhost", "10.1.2.3:80", "[2001:db8::1]:80", socket.gethostname().upper()],
            ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "2130706433"],
        ),
        (
            ELSEWHERE,
            ["gpu.example", "GPU.example:8000", "gpu.example.", "10.0.0.5", socket.gethostname()],
            ["127.0.0.1", "localhost", "10.0.0.6", "x.gpu.example", "evil.example"],
        ),
    ],
)
def test_names_lead_elsewhere_unless_they_are_known(
    callers: Callers, known: list[str], unknown: list[str]
) -> None:
    for host in known:
        assert status_of(callers, host=host) == 200, host
    for host in [
        *unknown,
        "",
        "a b",
        "user@127.0.0.1",
        "127.0.0.1:80:80",
        "127.0.0.1/",
        "[::1",
        "127.0.0.1,x",
    ]:
        assert status_of(callers, host=host) == 403, host
    # no browser
    assert status_of(callers) == 200


def test_names_can_be_made_known() -> None:
    named = callers_of(("127.0.0.1",), ("Chat.example", "[::2]"), (), False)
    assert [
        status_of(named, host=host) for host in ("chat.example:1", "[::2]", "localhost", "evil.example")
    ] == [
        *[200] * 3,
        403,
    ]
    assert status_of(callers_of(("127.0.0.1",), ("*",), (), False), host="evil.example") == 200
    # a key is not sent by itself, so names matter where they are given only
    assert callers_of(("127.0.0.1",), (), (), True) == ANY_CALLER
    keyed = callers_of(("10.0.0.5",), ("chat.example",), (), True)
    assert status_of(keyed, host="evil.example") == 403
    assert status_of(keyed, "POST", host="chat.example", origin=EVIL) == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://127.0.0.1:8000"}, 200),
        ({"origin": "https://127.0.0.1:8000"}, 200),
        ({"origin": "http://127.0.0.1:8000", "sec_fetch_site": "same-origin"}, 200),
        # a proxy has changed the host
        ({"origin": "https://chat.example", "sec_fetch_site": "same-origin"}, 200),
        ({"origin": "https://allowed.example", "sec_fetch_site": "cross-site"}, 200),
        ({"origin": EVIL}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"origin": "http://127.0.0.1:8001"}, 403),
        ({"origin": "http://127.0.0.1"}, 403),
        ({"origin": "http://127.0.0.1:8001", "sec_fetch_site": "same-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"origin": "http://127.0.0.1:8000", "sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "none"}, 200),
    ],
)
def test_pages_of_others_change_nothing(headers: dict[str, str], status: int) -> None:
    callers = callers_of(("127.0.0.1",), (), ("https://allowed.example",), False)
    for method in ("POST", "DELETE", "PUT", "PATCH", "ANYTHING"):
        assert status_of(callers, method, host="127.0.0.1:8000", **headers) == status
    for method in ("GET", "HEAD", "OPTIONS"):
        assert status_of(callers, method, host="127.0.0.1:8000", **headers) == 200
    anyone = callers_of(("127.0.0.1",), (), ("*",), False)
    assert status_of(anyone, "POST", host="127.0.0.1:8000", **headers) == 200


@pytest.mark.parametrize("host", ["", "http://a", "a:80", "a b", "*.example", "a/b"])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="allowed_hosts="):
        HttpConfig(allowed_hosts=("a.example", "10.0.0.1", "[::1]", "::1", "*", host))


def test_the_door_refuses_them_in_openais_words() -> None:
    async def scenario() -> None:
        async with served() as at:
            asked = {"prompt": "x"}
            rebound = await at.http.post("/v1/completions", json=asked, headers={"Host": "evil.example"})
            foreign = await at.http.post("/v1/completions", json=asked, headers={"Origin": EVIL})
            for answer, code, flag in (
                (rebound, "host_not_allowed", "--allowed-hosts"),
                (foreign, "origin_not_allowed", "--allowed-origins"),
            ):
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (403, code) and flag in error["message"]
            for path in ("/", "/page/main.js", "/metrics", "/v1/models", "/openapi.json", "/nothing"):
                assert (await at.http.get(path, headers={"Host": "evil.example"})).status_code == 403
                assert (await at.http.get(path, headers={"Origin": EVIL})).status_code in (200, 404)
            # a load balancer has names of its own
            assert (await at.http.get("/health", headers={"Host": "a.target.example"})).status_code != 403
            assert at.router.submitted == []

    play(scenario)


@pytest.mark.parametrize(
    "settings", [KEYED, {"allowed_hosts": ("evil.example",), "allowed_origins": (EVIL,)}]
)
def test_keys_or_flags_let_them_in(settings: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with served(**settings) as at:
            headers = {"Host": "evil.example", "Origin": EVIL, "Authorization": "Bearer secret", **JSON}
            answer = await at.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert answer.status_code == 200

    play(scenario)
