"""`/v1/completions` and `/v1/chat/completions`: from valid bodies to calls, and from calls to answers."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from alignedserve.gateway.chat.prepare import PreparedChat, chat_fields
from alignedserve.gateway.generation.endpoint import Endpoint
from alignedserve.gateway.generation.prepared import (
    Answering,
    Prepared,
    check_body,
    check_structure,
    checked_prompts,
    fields_of,
)
from alignedserve.gateway.generation.request_builder import RequestBuilder
from alignedserve.gateway.generation.responding import ANSWERED, read_call, respond
from alignedserve.gateway.http.description import request_body
from alignedserve.gateway.limits.limits import Limits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.openai.bodies import ChatBody, ChoicesBody, CompletionBody
from alignedserve.gateway.openai.chat_response import ChatResponseBuilder
from alignedserve.gateway.openai.choices_builder import Shown
from alignedserve.gateway.openai.completion_response import CompletionResponseBuilder


class PreparedCompletion(Prepared, frozen=True, kw_only=True):
    shown: Shown
    # Choices that the answer shows per prompt, and the text before them.
    num_given: int
    echoes: list[str] | None

    def response_builder(self, answering: Answering) -> CompletionResponseBuilder:
        return CompletionResponseBuilder(
            answering,
            self.shown,
            num_made=self.params.n,
            num_given=self.num_given,
            echoes=self.echoes,
        )


class PreparedChatCompletion(PreparedChat, frozen=True, kw_only=True):
    shown: Shown

    def response_builder(self, answering: Answering) -> ChatResponseBuilder:
        return ChatResponseBuilder(
            answering, self.shown, new_reader=self.reading.new_reader, shows_reasoning=self.shows_reasoning
        )


def completion(body: CompletionBody, model: ServedModel, limits: Limits) -> PreparedCompletion:
    """Returns the call of a completion. Raises ApiError and InvalidRequest."""
    with body.naming():
        check_body(body, model, limits)
        params = body.sampling_params()
        limits.check(len(body.prompts), params)
        check_structure(params, body.structure_name, limits)
        prompts = [model.prompt_ids(prompt) for prompt in body.prompts]
        params = checked_prompts(body, prompts, params, model, limits)
        return PreparedCompletion(
            **fields_of(body, prompts, params, body.structure_name, model),
            shown=_shown(body, body.logprobs),
            num_given=body.n or 1,
            echoes=[model.text_of("prompt", prompt) for prompt in prompts] if body.echo else None,
            gives_output=not body.is_only_echo,
            reports_progress=body.reports_progress,
        )


def chat(body: ChatBody, model: ServedModel, limits: Limits) -> PreparedChatCompletion:
    """Returns the call of a chat. Raises ApiError and InvalidRequest."""
    with body.naming():
        found = chat_fields(body, body.conversation(), model, limits)
        shown = _shown(body, found["params"].logprobs)
        return PreparedChatCompletion(**found, shown=shown, reports_progress=body.reports_progress)


def _shown(body: ChoicesBody, num_logprobs: int | None) -> Shown:
    return Shown(
        num_logprobs,
        body.prompt_logprobs,
        body.includes_usage,
        body.includes_usage_so_far,
        bool(body.return_token_ids),
    )


COMPLETIONS = Endpoint("/v1/completions", CompletionBody, completion, PreparedCompletion, in_batches=True)
CHAT = Endpoint("/v1/chat/completions", ChatBody, chat, PreparedChatCompletion, in_batches=True)


def completion_routes(request_builder: RequestBuilder) -> APIRouter:
    routes = APIRouter()

    @routes.post(COMPLETIONS.path, responses=ANSWERED, openapi_extra=request_body(CompletionBody))
    async def completions(http: Request) -> Response:
        call = await read_call(http, COMPLETIONS, request_builder)
        return await respond(http, call, request_builder)

    @routes.post(CHAT.path, responses=ANSWERED, openapi_extra=request_body(ChatBody))
    async def chat_completions(http: Request) -> Response:
        call = await read_call(http, CHAT, request_builder)
        return await respond(http, call, request_builder)

    return routes
