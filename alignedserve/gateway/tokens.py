"""`/tokenize` and `/detokenize`, as vLLM's server has them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from alignedserve.gateway.bodies import Messages, template_variables
from alignedserve.gateway.errors import ApiError
from alignedserve.gateway.model import ServedModel


class TokenizeBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    # exactly one of these two
    prompt: str | None = None
    messages: Messages | None = None
    # [default: true for a prompt; a chat template writes its own]
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(BaseModel):
    prompt: str


def tokens_router(model: ServedModel) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> TokenizeAnswer:
        model.check_name(body.model)
        tokens = await _tokens(model, body)
        strings = await model.token_texts(tokens) if body.return_token_strs else None
        return TokenizeAnswer(
            count=len(tokens), max_model_len=model.max_model_len, tokens=tokens, token_strs=strings
        )

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> DetokenizeAnswer:
        model.check_name(body.model)
        return DetokenizeAnswer(prompt=await model.long_text_of("tokens", body.tokens))

    return router


async def _tokens(model: ServedModel, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: exactly one of prompt and messages must be given", param="prompt")
    if body.prompt is not None:
        return await model.prompt_ids(body.prompt, body.add_special_tokens is not False)
    variables = {
        "add_generation_prompt": body.add_generation_prompt,
        **template_variables(body.chat_template_kwargs),
    }
    return await model.chat_ids(body.messages or [], variables, bool(body.add_special_tokens))
