"""What `doctor --url` reports about a server with incomplete answers."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from alignedserve.cli.doctor.command import _server_checks
from alignedserve.cli.doctor.finding import Level, findings_of
from alignedserve.cli.doctor.server import Server, what_is_wrong


def server_with(health: httpx2.Response) -> Server:
    transport = httpx2.MockTransport(lambda request: health)
    return Server(httpx2.Client(transport=transport, base_url="http://host:8000"))


@pytest.mark.parametrize(
    ("worst", "said"),
    [
        ("ok", "the server at http://host:8000 works"),
        ("warn", "the server at http://host:8000 works, see the warnings"),
        ("fail", "the server at http://host:8000 has problems"),
    ],
)
def test_the_verdict_is_about_the_server(worst: Level, said: str) -> None:
    server = server_with(httpx2.Response(200, json={"status": "ok"}))
    assert [each.level for each in server.health()] == ["ok"] and server.verdict(worst) == said


@pytest.mark.parametrize(
    "health",
    [
        httpx2.Response(404, text="<html>"),
        httpx2.Response(200, json=[]),
        httpx2.Response(200, json={"up": True}),
    ],
)
def test_another_program_is_not_taken_for_a_server_of_ours(health: httpx2.Response) -> None:
    with pytest.raises(
        ValueError, match=f"/health: HTTP {health.status_code}, which is not from AlignedServe"
    ):
        list(server_with(health).health())


def test_a_key_that_is_no_operators_leaves_processes_unchecked() -> None:
    refused = httpx2.Response(
        403, json={"error": {"message": "it needs an operator's key: see --operator-key"}}
    )
    [finding] = server_with(refused).processes()
    assert finding.level == "note" and "--operator-key" in finding.text


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({}, "the server needs an API key"),
        ({"Authorization": "Bearer wrong"}, "the server does not know this API key"),
    ],
)
def test_a_server_with_keys_is_asked_once_without_the_right_one(headers: dict[str, str], said: str) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        is_public = request.url.path == "/health"
        return httpx2.Response(200, json={"status": "ok"}) if is_public else httpx2.Response(401, json={})

    transport = httpx2.MockTransport(answer)
    server = Server(httpx2.Client(transport=transport, base_url="http://host:8000", headers=headers))
    found = [(check.area, each) for check in _server_checks(server) for each in findings_of(check)]
    assert [(area, each.level) for area, each in found] == [("health", "ok"), ("version", "fail")]
    assert found[1][1].text == said and "--api-key" in found[1][1].remedy
    assert server.verdict("fail").endswith("answers, and needs an API key for further checks")


@pytest.mark.parametrize(
    ("health", "said"),
    [
        ({"down": ["decode-0", "decode-1"]}, "decode-0, decode-1 down"),
        ({"store": "down", "reason": "batches wait"}, "batches wait"),
        (
            {"missing": ["1 of 2 islands are there", "node-1 is slow"]},
            "1 of 2 islands are there; node-1 is slow",
        ),
        (
            {"down": ["decode-0"], "files": "down", "reason": "files answer 503", "missing": ["none"]},
            "decode-0 down; files answer 503; none",
        ),
    ],
)
def test_a_degraded_server_says_what_is_wrong(health: dict[str, Any], said: str) -> None:
    assert what_is_wrong({"status": "degraded"} | health) == said
