"""Clients of chats, each with one stream at a time. Some read at once, some slowly, and some disconnect."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

import httpx2

from alignedserve.protocol.sse import EventReader
from benchmarks.soak.faults import FaultLog
from benchmarks.soak.questions import Answer, Question
from benchmarks.soak.silences import Silences, client_name
from benchmarks.soak.tally import Tally
from benchmarks.soak.transcript import Transcript

Manner = Literal["reads", "reads slowly", "leaves at some time", "leaves in the middle"]
MANNERS: tuple[Manner, ...] = (
    *("reads",) * 6,
    "reads slowly",
    "leaves at some time",
    "leaves in the middle",
)
PATH = "/v1/chat/completions"
SERVICE_TIERS = {"rt": ("default", "priority"), "be": ("flex",)}
# Longer than any documented wait: a request is answered, or fails after a minute without a router.
STREAM_S = 240.0
MAX_PATIENCE_S = 3.0
MAX_REST_S = 0.3
# A slow reader's buffer in bytes, small enough for the server to notice; and its pauses between pieces, in seconds.
SLOW_BYTES = 4096
MAX_SLOW_S, LONG_SLOW_S = 0.05, 2.0
AGAIN_S = 0.1

Ending = Literal["complete", "left", "again", "wrong"]


@dataclass(frozen=True)
class Shared:
    """The state that all clients share."""

    url: str
    asked: Sequence[tuple[Question, Answer]]
    faults: FaultLog
    tally: Tally
    silences: Silences
    stop: asyncio.Event


class Chatter:
    def __init__(self, shared: Shared, tier: str, number: int, seed: int) -> None:
        self._at = shared
        self._tier = tier
        self.name = client_name(tier, number)
        self._dice = random.Random(f"{self.name} {seed}")

    async def run(self) -> None:
        while not self._at.stop.is_set():
            number = self._dice.randrange(len(self._at.asked))
            manner = self._dice.choice(MANNERS)
            service_tier = self._dice.choice(SERVICE_TIERS[self._tier])
            while await self._ask(number, manner, service_tier) == "again":
                await asyncio.sleep(AGAIN_S)
            self._at.silences.ends(self.name)
            await asyncio.sleep(self._dice.uniform(0, MAX_REST_S))

    async def _ask(self, number: int, manner: Manner, service_tier: str) -> Ending:
        question, answer = self._at.asked[number]
        body = question.body | {
            "stream": True,
            "stream_options": {"include_usage": True},
            "service_tier": service_tier,
        }
        patience_s = self._dice.uniform(0, MAX_PATIENCE_S) if manner == "leaves at some time" else STREAM_S
        transcript, begin_s = Transcript(answer), time.monotonic()
        # A slow reader is silent by itself, and its tokens may be old.
        if manner != "reads slowly":
            self._at.silences.asks(self.name, begin_s)
        try:
            async with asyncio.timeout(patience_s):
                status = await self._listen(body, manner, transcript)
        except TimeoutError:
            status = None if manner == "leaves at some time" else 0
        except httpx2.TransportError as error:
            self._at.tally.count_broken(error)
            return self._lost(begin_s, number, f"{type(error).__name__} {error}", transcript)
        except (ValueError, LookupError) as error:
            return self._object(number, f"an event that is no chunk: {error!r}")
        return self._judge(status, begin_s, number, transcript)

    async def _listen(self, body: dict[str, object], manner: Manner, transcript: Transcript) -> int | None:
        """Returns the status, or that of an error in the stream; None if the client has disconnected. Raises
        httpx2.TransportError."""
        most = self._dice.randrange(1, 40) if manner == "leaves in the middle" else None
        num_pieces = 0
        async with (
            httpx2.AsyncClient(transport=_transport(manner), timeout=None) as http,
            http.stream("POST", self._at.url + PATH, json=body) as response,
        ):
            if response.status_code != 200:
                transcript.error = (await response.aread()).decode(errors="replace")[:300]
                return response.status_code
            async for event in _events(response):
                if transcript.take(event):
                    num_pieces += 1
                    self._at.silences.hears(self.name, time.monotonic())
                if num_pieces == most:
                    return None
                if manner == "reads slowly":
                    await asyncio.sleep(self._slow_s())
        return 500 if transcript.error else 200

    def _slow_s(self) -> float:
        return self._dice.uniform(0, LONG_SLOW_S if self._dice.random() < 0.02 else MAX_SLOW_S)

    def _judge(self, status: int | None, begin_s: float, number: int, transcript: Transcript) -> Ending:
        """Judges the end of a stream. `status` is None if the client has disconnected, and 0 if the stream took too
        long."""
        if transcript.wrong:
            return self._object(number, transcript.wrong)
        if status is None:
            self._at.tally.num_left += 1
            return "left"
        if status == 0:
            return self._object(number, f"no end within {STREAM_S:g} s")
        now = time.monotonic()
        if status != 200:
            if not self._at.faults.excuses_status(status, begin_s, now):
                return self._object(number, f"{status} without a reason for it: {transcript.error}")
            self._at.tally.num_refused += 1
            return "again"
        if not transcript.is_done:
            self._at.tally.num_lost += 1
            return self._lost(begin_s, number, "it ended without [DONE]", transcript)
        self._at.tally.num_streams += 1
        self._at.tally.num_tokens += self._at.asked[number][1].num_tokens
        return "complete"

    def _lost(self, begin_s: float, number: int, how: str, transcript: Transcript) -> Ending:
        if transcript.wrong:
            return self._object(number, transcript.wrong)
        if not self._at.faults.excuses_lost(begin_s, time.monotonic()):
            return self._object(number, f"its connection broke while its gateway lived: {how}")
        return "again"

    def _object(self, number: int, what: str) -> Ending:
        self._at.tally.object(f"stream of {self.name}, question {number}: {what}")
        return "wrong"


def _transport(manner: Manner) -> httpx2.AsyncHTTPTransport:
    """Uses one connection per call, because a kept one may belong to a gateway that has died."""
    if manner != "reads slowly":
        return httpx2.AsyncHTTPTransport()
    return httpx2.AsyncHTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BYTES)])


async def _events(response: httpx2.Response) -> AsyncIterator[bytes]:
    reader = EventReader()
    async for data in response.aiter_bytes():
        for event in reader.feed(data):
            yield event
