"""A line of a batch job, answered as its endpoint would answer it, but as best effort and never in a stream."""

from __future__ import annotations

import time
from typing import Any

from pydantic import ValidationError

from alignedserve.batch.results import Answer as LineAnswer
from alignedserve.gateway.answers import Answer, ChatAnswer, CompletionAnswer, Json
from alignedserve.gateway.bodies import ChatBody, CompletionBody
from alignedserve.gateway.errors import ApiError, invalid, misshapen
from alignedserve.gateway.generation import Generation
from alignedserve.gateway.islands import Islands
from alignedserve.gateway.model import ServedModel
from alignedserve.types import InvalidRequest


class LineAnswers:
    def __init__(self, model: ServedModel, islands: Islands) -> None:
        self._model = model
        self._islands = islands

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
        prompts, params, answer = _READ[endpoint](self._model, body)
        for prompt in prompts:
            self._model.check(prompt, params)
        generation = Generation(self._islands, self._model, prompts, params, "be", deadline_s)
        generation.start()
        try:
            return answer.whole([delta async for delta in generation.deltas()], generation.usage)
        finally:
            generation.close()


def _chat(model: ServedModel, raw: Json) -> tuple[list[list[int]], Any, Answer]:
    body = ChatBody.model_validate(raw)
    _check(model, body)
    answer = ChatAnswer(model, int(time.time()), bool(body.logprobs))
    return [model.chat_ids(body.messages, body.chat_template_kwargs or {})], body.sampling_params(), answer


def _completion(model: ServedModel, raw: Json) -> tuple[list[list[int]], Any, Answer]:
    body = CompletionBody.model_validate(raw)
    _check(model, body)
    answer = CompletionAnswer(model, int(time.time()), body.logprobs is not None)
    return [model.prompt_ids(prompt) for prompt in body.prompts], body.sampling_params(), answer


def _check(model: ServedModel, body: ChatBody | CompletionBody) -> None:
    model.check_name(body.model)
    if body.stream:
        raise InvalidRequest("stream=True: not possible in a batch")


_READ = {"/v1/chat/completions": _chat, "/v1/completions": _completion}
