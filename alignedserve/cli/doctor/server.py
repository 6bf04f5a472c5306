"""A server that runs: `alignedserve doctor --url`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from alignedserve.cli.chat_client import Answer, ChatClient, Refused, away
from alignedserve.cli.doctor.finding import Finding, NotChecked, fail, ok, warn
from alignedserve.cli.http import refusal

_QUESTION = [{"role": "user", "content": "Hello"}]
_MAX_TOKENS = 4


def what_is_wrong(health: Mapping[str, Any]) -> str:
    """Returns what a degraded server's /health says, in a line."""
    down = [f"{', '.join(health['down'])} down"] if health.get("down") else []
    reason = [health["reason"]] if "reason" in health else []
    return "; ".join([*down, *reason, *health.get("missing", [])])


class Server:
    """Checks of a running server, in the order in which they are made."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def health(self) -> Iterator[Finding]:
        """The first check: whether there is a server."""
        try:
            body = self._http.get("/health").json()
        except httpx.TransportError as error:
            raise ValueError(away(self._http, error)) from None
        match body["status"]:
            case "ok":
                yield ok("ok")
            case "degraded":
                yield warn(f"degraded: {what_is_wrong(body)}", "see what serve says")
            case _:
                yield fail(body["reason"], "see what serve says")

    def version(self) -> Iterator[Finding]:
        about = self._get("/openapi.json")["info"]
        yield ok(f"{about['title']} {about['version']}")

    def processes(self) -> Iterator[Finding]:
        processes = self._get("/v1/cluster")["processes"]
        down = [each["instance_id"] for each in processes if each["state"] != "up"]
        if down:
            yield warn(f"down: {', '.join(down)}", "they are started again; see what serve says")
        else:
            yield ok(f"all {len(processes)} are up")

    def model(self) -> Iterator[Finding]:
        yield ok(self._model())

    def request(self) -> Iterator[Finding]:
        """Sends a short request, and measures how long the answer takes."""
        answer = Answer()
        client = ChatClient(self._http, self._model(), {"max_tokens": _MAX_TOKENS, "temperature": 0})
        try:
            for _ in client.answer(_QUESTION, answer):
                pass
        except Refused as error:
            raise ValueError(str(error)) from None
        yield ok(answer.stats)

    def _model(self) -> str:
        return str(self._get("/v1/models")["data"][0]["id"])

    def _get(self, path: str) -> Any:
        try:
            answer = self._http.get(path)
        except httpx.TransportError:
            raise NotChecked("a server that answers") from None
        if answer.is_error:
            raise ValueError(refusal(answer))
        return answer.json()
