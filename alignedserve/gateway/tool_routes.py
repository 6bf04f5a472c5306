"""Small routes that clients of vLLM and SageMaker call: what the server is, its tokenizer, and calls of any kind."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from pydantic import BaseModel

from alignedserve.gateway.generation.endpoint import DirectAnswer, Endpoint
from alignedserve.gateway.generation.responding import ANSWERED, RequestBuilder, respond, unless_gone
from alignedserve.gateway.http.access import DrainState
from alignedserve.gateway.http.description import request_body
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_pieces import Json, encode
from alignedserve.gateway.http.keys import owner_of
from alignedserve.gateway.http.reading import json_body
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.openai.completions import CHAT, COMPLETIONS
from alignedserve.gateway.openai.embeddings.routes import EMBEDDINGS, RERANKS, SCORE
from alignedserve.version import __version__

# ---- calls of any kind -----------------------------------------------------------------------------------------------

# The first field of a body that is in this table determines its endpoint.
KINDS: Final = {
    "messages": CHAT,
    "prompt": COMPLETIONS,
    "text_1": SCORE,
    "query": RERANKS[0],
    "input": EMBEDDINGS,
}


class InvocationBody(BaseModel):
    """The body of any of these endpoints. That endpoint checks it."""

    messages: Any = None
    prompt: Any = None
    text_1: Any = None
    query: Any = None
    input: Any = None


def kind_of(body: InvocationBody, model: ServedModel, limits: CallLimits) -> DirectAnswer:
    """Returns the name of the field by which the endpoint is found. Raises ApiError."""
    found = next((name for name in KINDS if name in body.model_fields_set), None)
    if found is None:
        raise ApiError(400, f"the body must have one of {', '.join(KINDS)}")
    return DirectAnswer(memoryview(encode(found)))


INVOCATIONS: Final = Endpoint("/invocations", InvocationBody, kind_of)


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


class TokenizerInfo:
    """What lm-evaluation-harness needs to tokenize by way of this server, named as in a tokenizer's config."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    @cached_property
    def body(self) -> bytes:
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            raise ApiError(404, "this model has no tokenizer")
        files = tokenizer.files
        added = {
            str(token_id): {"content": token.content, "special": token.special}
            for token_id, token in sorted(files.backend.get_added_tokens_decoder().items())
        }
        return encode(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token")),
                **files.special_tokens,
                "added_tokens_decoder": added,
                "model_max_length": self._model.max_model_len,
                "chat_template": files.chat_templates.get("default"),
            }
        )


# ---- routes ----------------------------------------------------------------------------------------------------------


def tool_routes(request_builder: RequestBuilder, drain_state: DrainState) -> APIRouter:
    routes, tokenizer = APIRouter(), TokenizerInfo(request_builder.model)

    @routes.get("/version")
    async def version() -> Json:
        return {"version": __version__}

    @routes.get("/load")
    async def load(http: Request) -> Json:
        sees_all = http.state.may_read_counters
        num_open = drain_state.num_open_of_all if sees_all else drain_state.num_open(owner_of(http))
        # Without this call itself.
        return {"server_load": num_open - 1}

    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        return Response(tokenizer.body, media_type="application/json")

    @routes.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return RedirectResponse("/openapi.json")

    @routes.post(INVOCATIONS.path, responses=ANSWERED, openapi_extra=request_body(InvocationBody))
    async def invocations(http: Request) -> Response:
        owner, body, preparer = owner_of(http), await json_body(http), request_builder.preparer
        kind = await unless_gone(http, preparer.answer(INVOCATIONS, body, owner))
        endpoint = KINDS[msgspec.json.decode(kind.body)]
        call = await unless_gone(http, preparer.call(endpoint, body, owner))
        return await respond(http, call, request_builder)

    return routes
