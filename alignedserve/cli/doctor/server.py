"""Checks of a running server: `alignedserve doctor --url`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import httpx2

from alignedserve.cli.chat_client import ChatAnswer, ChatClient, NoAnswer
from alignedserve.cli.doctor.finding import Finding, Level, NotChecked, fail, note, ok, warn
from alignedserve.cli.http import refusal, why_away

_QUESTION = [{"role": "user", "content": "Hello"}]
_MAX_TOKENS = 4


def what_is_wrong(health: Mapping[str, Any]) -> str:
    """Returns the problems in a degraded server's /health, in one line."""
    down = [f"{', '.join(health['down'])} down"] if health.get("down") else []
    reason = [health["reason"]] if "reason" in health else []
    return "; ".join([*down, *reason, *health.get("missing", [])])


def _finding_of(status: str, health: Mapping[str, Any]) -> Finding:
    match status:
        case "ok":
            return ok("ok")
        case "degraded":
            return warn(f"degraded: {what_is_wrong(health)}", "see the output of serve")
        case _:
            return fail(health["reason"], "see the output of serve")


class Server:
    """The checks, in their order."""

    def __init__(self, http: httpx2.Client) -> None:
        self._http = http
        # Whether `health` has got an answer. Without one, there is nothing else to check.
        self.has_answered = False
        # Whether it has refused the API key, or that there is none. Then there is nothing else to check either.
        self.has_refused = False

    def health(self) -> Iterator[Finding]:
        """Checks whether a server answers."""
        try:
            answer = self._http.get("/health")
        except httpx2.TransportError as error:
            raise ValueError(why_away(self._http, error)) from None
        self.has_answered = True
        try:
            body = answer.json()
            status = body["status"]
        except (ValueError, LookupError, TypeError):
            raise ValueError(
                f"{answer.url}: HTTP {answer.status_code}, which is not from AlignedServe"
            ) from None
        yield _finding_of(status, body)

    def verdict(self, worst: Level) -> str:
        """Returns the end of the last line: what is so at this URL."""
        server = f"the server at {str(self._http.base_url).rstrip('/')}"
        if not self.has_answered:
            return f"{server} does not answer"
        if self.has_refused:
            return f"{server} answers, and needs an API key for further checks"
        return {"fail": f"{server} has problems", "warn": f"{server} works, see the warnings"}.get(
            worst, f"{server} works"
        )

    def version(self) -> Iterator[Finding]:
        about = self._get("/openapi.json")["info"]
        yield ok(f"{about['title']} {about['version']}")

    def processes(self) -> Iterator[Finding]:
        answer = self._ask("/v1/cluster")
        if answer.status_code == httpx2.codes.FORBIDDEN:
            yield note(f"not checked: {refusal(answer)}; pass one with --operator-key")
            return
        processes = self._body(answer)["processes"]
        down = [each["instance_id"] for each in processes if each["state"] != "up"]
        if down:
            yield warn(f"down: {', '.join(down)}", "they will be restarted; see the output of serve")
        else:
            yield ok(f"all {len(processes)} are up")

    def model(self) -> Iterator[Finding]:
        yield ok(self._model())

    def request(self) -> Iterator[Finding]:
        """Sends a short request and measures the answer's time."""
        answer = ChatAnswer()
        client = ChatClient(self._http, self._model(), {"max_tokens": _MAX_TOKENS, "temperature": 0})
        try:
            for _ in client.answer(_QUESTION, answer):
                pass
        except NoAnswer as error:
            raise ValueError(str(error)) from None
        yield ok(answer.stats)

    def _model(self) -> str:
        return str(self._get("/v1/models")["data"][0]["id"])

    def _get(self, path: str) -> Any:
        return self._body(self._ask(path))

    def _ask(self, path: str) -> httpx2.Response:
        try:
            return self._http.get(path)
        except httpx2.TransportError:
            raise NotChecked("a server that answers") from None

    def _body(self, answer: httpx2.Response) -> Any:
        if answer.status_code == 401:
            self.has_refused = True
            is_given = "authorization" in self._http.headers
            raise ValueError(
                "the server does not know this API key" if is_given else "the server needs an API key"
            )
        if answer.is_error:
            raise ValueError(refusal(answer))
        return answer.json()
