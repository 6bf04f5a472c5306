"""Checks of a running server: `alignedserve doctor --url`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import httpx2

from alignedserve.cli.chat_client import Answer, ChatClient, Refused
from alignedserve.cli.doctor.finding import Finding, NotChecked, fail, ok, warn
from alignedserve.cli.http import away, refusal

_QUESTION = [{"role": "user", "content": "Hello"}]
_MAX_TOKENS = 4


def what_is_wrong(health: Mapping[str, Any]) -> str:
    """Returns the problems in a degraded server's /health, in one line."""
    down = [f"{', '.join(health['down'])} down"] if health.get("down") else []
    reason = [health["reason"]] if "reason" in health else []
    return "; ".join([*down, *reason, *health.get("missing", [])])


class Server:
    """The checks, in their order."""

    def __init__(self, http: httpx2.Client) -> None:
        self._http = http

    def health(self) -> Iterator[Finding]:
        """Checks whether a server answers."""
        try:
            body = self._http.get("/health").json()
        except httpx2.TransportError as error:
            raise ValueError(away(self._http, error)) from None
        match body["status"]:
            case "ok":
                yield ok("ok")
            case "degraded":
                yield warn(f"degraded: {what_is_wrong(body)}", "see the output of serve")
            case _:
                yield fail(body["reason"], "see the output of serve")

    def version(self) -> Iterator[Finding]:
        about = self._get("/openapi.json")["info"]
        yield ok(f"{about['title']} {about['version']}")

    def processes(self) -> Iterator[Finding]:
        processes = self._get("/v1/cluster")["processes"]
        down = [each["instance_id"] for each in processes if each["state"] != "up"]
        if down:
            yield warn(f"down: {', '.join(down)}", "they will be restarted; see the output of serve")
        else:
            yield ok(f"all {len(processes)} are up")

    def model(self) -> Iterator[Finding]:
        yield ok(self._model())

    def request(self) -> Iterator[Finding]:
        """Sends a short request and measures the answer's time."""
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
        except httpx2.TransportError:
            raise NotChecked("a server that answers") from None
        if answer.is_error:
            raise ValueError(refusal(answer))
        return answer.json()
