"""Clients that request a chat or a completion, streamed or not. Some read slowly, some leave, and some return."""

from __future__ import annotations

import asyncio
import json

from alignedserve.vopr.front_end.answers import StreamedAnswer, check_whole
from alignedserve.vopr.front_end.calls import RETRY_S, Calls
from alignedserve.vopr.front_end.delivered import Delivered
from alignedserve.vopr.front_end.http_call import ConnectionBroken, HttpCall
from alignedserve.vopr.front_end.wanted import AwaitedAnswers
from alignedserve.vopr.front_end.words import NAME, Question
from alignedserve.vopr.history import Ask

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# The share of a stream's pieces after which a slow reader pauses.
_PAUSES = 0.1


class Chat:
    def __init__(
        self, ask: Ask, question: Question, calls: Calls, wanted: AwaitedAnswers, delivered: Delivered
    ) -> None:
        self._ask = ask
        self._question = question
        self._calls = calls
        self._wanted = wanted
        self._delivered = delivered
        self._name = f"client {ask.key}"
        self._num_calls = 0

    async def run(self) -> str:
        """Returns how it ended."""
        ask = self._ask
        outcome = await self._until_answered(ask.leaves_after, ask.leaves_after_s)
        if outcome == "left" and ask.is_back_after_s is not None:
            await asyncio.sleep(ask.is_back_after_s)
            outcome = await self._until_answered(None, None)
        return outcome

    async def _until_answered(self, leaves_after: int | None, leaves_after_s: float | None) -> str:
        self._wanted.want(self._question.seed)
        try:
            async with asyncio.timeout(leaves_after_s):
                while (outcome := await self._try(leaves_after)) not in ("answered", "left"):
                    self._calls.count(outcome)
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            outcome = "left"
        finally:
            self._wanted.unwant(self._question.seed)
        self._calls.count(outcome)
        return outcome

    async def _try(self, leaves_after: int | None) -> str:
        """Returns the outcome of one call."""
        self._num_calls += 1
        request_id = f"{self._name}/{self._num_calls}".replace(" ", "-")
        self._delivered.begins(request_id)
        path = CHATS if self._ask.is_chat else COMPLETIONS
        call = self._calls.begin(self._name, "POST", path, self._body(), request_id=request_id)
        if call is None:
            return "nobody there"
        try:
            if self._ask.is_stream:
                return await self._read(call, leaves_after, request_id)
            answer = await call.whole()
            if answer.status == 200:
                check_whole(json.loads(answer.body), self._question, self._ask.is_chat)
            return "answered" if answer.status == 200 else str(answer.status)
        except ConnectionBroken:
            return "broken"
        finally:
            call.leave()

    async def _read(self, call: HttpCall, leaves_after: int | None, request_id: str) -> str:
        stream = StreamedAnswer(self._question, self._ask.is_chat)
        async for piece in call.pieces():
            if call.status != 200:
                continue
            stream.feed(piece)
            self._delivered.shown(request_id, stream.num_words)
            if leaves_after is not None and stream.num_events >= leaves_after:
                return "left"
            if self._ask.pause_s and self._calls.chances.next(f"pause of {self._name}") < _PAUSES:
                await asyncio.sleep(self._ask.pause_s)
        if call.status != 200:
            return str(call.status)
        return "answered" if stream.close() else "error"

    def _body(self) -> bytes:
        return json.dumps(asked(self._question, self._ask.is_chat, self._more())).encode()

    def _more(self) -> dict[str, object]:
        more: dict[str, object] = {"stream": self._ask.is_stream}
        return more | {"service_tier": "flex"} if self._ask.is_flex else more


def asked(question: Question, is_chat: bool, more: dict[str, object]) -> dict[str, object]:
    """Returns the body of a call."""
    messages = [{"role": "user", "content": question.prompt}]
    prompt: dict[str, object] = {"messages": messages} if is_chat else {"prompt": question.prompt}
    return {"model": NAME, "seed": question.seed, "max_tokens": question.max_tokens} | prompt | more
