"""`/tokenize` and `/detokenize`: their bodies, what they return, and their routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from alignedserve.gateway.generation.chat import is_continued_by, readable, template_variables, tool_variables
from alignedserve.gateway.generation.endpoint import DirectAnswer, Endpoint
from alignedserve.gateway.generation.responding import RequestBuilder, answer_directly
from alignedserve.gateway.http.description import request_body
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.fields import BodyFields
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.openai.bodies import Messages, ReasoningFields
from alignedserve.gateway.tools.bodies import AnyChoice, Tool, offered
from alignedserve.gateway.tools.harmony import effort_of


class TokenizeBody(ReasoningFields):
    refused: ClassVar[Mapping[str, str]] = {
        "chat_template": ": the model's own is used",
    }

    model: str | None = None
    # Exactly one of these two is given.
    prompt: str | None = None
    messages: Messages | None = None
    # The default is true for a prompt. A chat template writes its own special tokens.
    add_special_tokens: bool | None = None
    # The default is true, unless the last message is continued.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Fields of a chat that change its prompt.
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: AnyChoice | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(BodyFields):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(BaseModel):
    prompt: str


def tokenized(body: TokenizeBody, model: ServedModel, limits: CallLimits) -> DirectAnswer:
    model.check_name(body.model)
    tokens, ignored = _tokens(model, body)
    strings = list(map(model.token_text, tokens)) if body.return_token_strs else None
    found = {
        "count": len(tokens),
        "max_model_len": model.max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }
    return DirectAnswer(memoryview(msgspec.json.encode(found)), ignored=ignored)


def detokenized(body: DetokenizeBody, model: ServedModel, limits: CallLimits) -> DirectAnswer:
    model.check_name(body.model)
    return DirectAnswer(memoryview(msgspec.json.encode({"prompt": model.text_of("tokens", body.tokens)})))


def _tokens(model: ServedModel, body: TokenizeBody) -> tuple[list[int], list[str]]:
    """Returns the tokens, and the names of the fields that are ignored for this model."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: exactly one of prompt and messages must be given", param="prompt")
    if body.prompt is not None:
        return model.prompt_ids(body.prompt, body.add_special_tokens is not False), []
    # Without tools, the tool choice does not change the prompt.
    tools, _ = offered(body.tools, body.tool_choice) if body.tools else ([], "none")
    ignored = ["tools"] if tools and not model.has_place_for_tools else []
    if ignored:
        tools = []
    effort = body.effort
    if model.writes_harmony(has_tools=bool(tools)):
        effort = effort_of(effort)
    variables = {
        "add_generation_prompt": body.add_generation_prompt is not False,
        **template_variables(body.chat_template_kwargs, effort),
        **tool_variables(tools, model),
    }
    is_continued = is_continued_by(
        body.continue_final_message, body.add_generation_prompt, body.messages or []
    )
    return model.chat_ids(
        readable(body.messages or []), variables, bool(body.add_special_tokens), is_continued=is_continued
    ), ignored


TOKENIZE = Endpoint("/tokenize", TokenizeBody, tokenized)
DETOKENIZE = Endpoint("/detokenize", DetokenizeBody, detokenized)


def tokens_router(request_builder: RequestBuilder) -> APIRouter:
    router = APIRouter()

    # SGLang's path, and vLLM's.
    @router.post(
        "/v1/tokenize", responses={200: {"model": TokenizeAnswer}}, openapi_extra=request_body(TokenizeBody)
    )
    @router.post(
        TOKENIZE.path, responses={200: {"model": TokenizeAnswer}}, openapi_extra=request_body(TokenizeBody)
    )
    async def tokenize(http: Request) -> Response:
        return await answer_directly(http, TOKENIZE, request_builder)

    @router.post(
        "/v1/detokenize",
        responses={200: {"model": DetokenizeAnswer}},
        openapi_extra=request_body(DetokenizeBody),
    )
    @router.post(
        DETOKENIZE.path,
        responses={200: {"model": DetokenizeAnswer}},
        openapi_extra=request_body(DetokenizeBody),
    )
    async def detokenize(http: Request) -> Response:
        return await answer_directly(http, DETOKENIZE, request_builder)

    return router
