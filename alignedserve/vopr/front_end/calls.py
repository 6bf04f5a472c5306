"""A client's calls: to any gateway that accepts them, and repeated until there is an answer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from alignedserve.vopr.chances import KeyedRandom
from alignedserve.vopr.failures import Broken
from alignedserve.vopr.front_end.http_call import JSON, ConnectionBroken, HttpAnswer, HttpCall
from alignedserve.vopr.front_end.virtual_gateway import VirtualGateway

# Seconds until a client retries.
RETRY_S = 1.0


class Calls:
    """The shared state of all clients."""

    def __init__(
        self, gateways: Sequence[VirtualGateway], chances: KeyedRandom, record: Callable[..., None]
    ) -> None:
        self.chances = chances
        # The outcomes of calls: "answered", "left", a status, ...
        self.outcomes: Counter[str] = Counter()
        self._gateways = gateways
        self._record = record

    def begin(
        self, client: str, method: str, path: str, body: bytes = b"", kind: str = JSON, request_id: str = ""
    ) -> HttpCall | None:
        """Returns the call; None if no process listens where the client tries it."""
        number = int(len(self._gateways) * self.chances.next(f"gateway of {client}"))
        gateway = self._gateways[min(number, len(self._gateways) - 1)]
        return gateway.call(method, path, body, kind, request_id)

    def count(self, outcome: str) -> None:
        self.outcomes[outcome] += 1
        self._record("call", outcome)

    async def ask(
        self,
        client: str,
        method: str,
        path: str,
        body: bytes = b"",
        kind: str = JSON,
        is_enough: tuple[int, ...] = (),
        comes_again: tuple[int, ...] = (),
    ) -> HttpAnswer:
        """Calls until the answer is a success, or has a status of `is_enough`. Retries a call that fails for reasons
        other than the client's, or with a status of `comes_again`."""
        while True:
            answer = await self._try(client, method, path, body, kind)
            if answer and answer.status in (200, *is_enough):
                return answer
            if answer and answer.status < 500 and answer.status not in (429, *comes_again):
                raise Broken(f"a client is answered with {answer.status} ({method} {path}: {answer.body!r})")
            await asyncio.sleep(RETRY_S)

    async def ask_json(self, client: str, method: str, path: str, body: bytes = b"", kind: str = JSON) -> Any:
        answer = await self.ask(client, method, path, body, kind)
        return json.loads(answer.body)

    async def _try(self, client: str, method: str, path: str, body: bytes, kind: str) -> HttpAnswer | None:
        call = self.begin(client, method, path, body, kind)
        if call is None:
            return None
        try:
            answer = await call.whole()
        except ConnectionBroken:
            self.count("broken")
            return None
        self.count(str(answer.status))
        return answer
