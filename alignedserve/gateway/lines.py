"""A line of a batch job, answered as its endpoint would answer it, but as best effort and never in a stream."""

from __future__ import annotations

import time
from typing import Any

from pydantic import ValidationError

from alignedserve.batch.results import Answer as LineAnswer
from alignedserve.gateway.answers import Answer, Json
from alignedserve.gateway.bodies import ChatBody, CompletionBody
from alignedserve.gateway.errors import ApiError, invalid, misshapen
from alignedserve.gateway.generation import Generation
from alignedserve.gateway.intake import Intake
from alignedserve.gateway.service import Service
from alignedserve.types import InvalidRequest


class LineAnswers:
    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def ask(self, endpoint: str, body: Json, expires_at: float) -> LineAnswer:
        """`expires_at`: when the job does, by time.time()."""
        deadline_s = time.monotonic() + expires_at - time.time()
        try:
            return LineAnswer(200, await self._answer(endpoint, body, deadline_s))
        except ValidationError as error:
            first = error.errors()[0]
            failure = misshapen(first, first["loc"])
        except InvalidRequest as error:
            failure = invalid(error)
        except ApiError as error:
            failure = error
        return LineAnswer(failure.status, failure.body)

    async def _answer(self, endpoint: str, body: dict[str, Any], deadline_s: float) -> Json:
        generation, answer = await self._take(endpoint, body, Service("flex", "be", deadline_s=deadline_s))
        try:
            generation.start()
            found = [delta async for delta in generation.deltas()]
            return await generation.beside(lambda: answer.whole(found, generation.usage))
        finally:
            generation.close()

    async def _take(self, endpoint: str, raw: Json, service: Service) -> tuple[Generation, Answer]:
        if endpoint == "/v1/chat/completions":
            chat = ChatBody.model_validate(raw)
            _check_stream(chat)
            return await self._intake.chat(chat, service)
        completion = CompletionBody.model_validate(raw)
        _check_stream(completion)
        return await self._intake.completion(completion, service)


def _check_stream(body: ChatBody | CompletionBody) -> None:
    if body.stream:
        raise InvalidRequest("stream=True: not possible in a batch")
