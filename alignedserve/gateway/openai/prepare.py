"""From the bytes of a body to a valid call: parsed, checked, put into the template, tokenised.

The work grows with what a client sends, so it is done by plain functions, which the event loop calls for small bodies
and a process of its own for large ones (preparer.py). The result is bounded by the server's limits.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from alignedserve.gateway.grammars.structure import check_size
from alignedserve.gateway.http.errors import ApiError, invalid, misshapen
from alignedserve.gateway.limits import Limits
from alignedserve.gateway.model import ServedModel
from alignedserve.gateway.openai.bodies import ChatBody, CompletionBody
from alignedserve.gateway.openai.service import ServiceTier
from alignedserve.gateway.openai.token_bodies import DetokenizeBody, TokenizeBody, detokenized, tokenized
from alignedserve.gateway.tools.bodies import ChosenTool, readable
from alignedserve.gateway.tools.families import family_of
from alignedserve.gateway.tools.readers import HERMES_OPEN, JsonReader, NamedReader
from alignedserve.sampling_params import SamplingParams
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.types import InvalidRequest

# The type of token ids in `Prepared.prompts`: four bytes each.
_ID: Final = "i"

AnyBody = TypeVar("AnyBody", bound=BaseModel)


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A valid call, except for its grammar, which is compiled elsewhere."""

    # The token ids of each prompt, packed: lists of them take long to decode and to encode.
    prompts: list[bytes]
    params: SamplingParams
    # The name of the parameter that prescribes the form of the output.
    structure_name: str
    is_chat: bool
    # How the request is to be served.
    is_stream: bool
    includes_usage: bool
    service_tier: ServiceTier | None
    ttft_ms: float | None
    tbt_ms: float | None
    cache_salt: str
    # What the answer shows.
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    # For completions: the number of choices that are given for each prompt, and the texts with which they begin.
    num_given: int = 1
    echoes: list[str] | None = None
    gives_output: bool = True
    # For chats: the kind of parser for tool calls, and the tool if only one can be called.
    reader: str | None = None
    tool_name: str = ""


@dataclass(frozen=True)
class _Tooling:
    """What tools mean for a chat: for its template, for the constraints on the output, and for parsing its text."""

    # The variables for the chat template.
    variables: dict[str, Any] = field(default_factory=dict)
    # What finds calls in the text: a kind of reader (tools/readers.py), and the tool if only one can be called.
    reader: str | None = None
    tool_name: str = ""
    # The grammar if the model may call or not, and the client asks for no other format.
    structure: StructuredOutputsParams | None = None
    # Whether a tag around calls is a token that would be left out of the text.
    shows_special_tokens: bool = False


# Bytes are the complete answer: /tokenize and /detokenize need no engine.
Result = Prepared | bytes


def prepare(endpoint: str, data: bytes, model: ServedModel, limits: Limits) -> Result:
    """`endpoint` is one of ENDPOINTS. Raises ApiError, and nothing else that a client could cause."""
    body_type, made = ENDPOINTS[endpoint]
    body = _validated(_parsed(data), body_type)
    try:
        return made(body, model, limits)
    except InvalidRequest as error:
        raise invalid(error) from error


def ids_of(packed: bytes) -> list[int]:
    """Returns the token ids of one of a call's prompts."""
    ids = array(_ID)
    ids.frombytes(packed)
    return ids.tolist()


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error.msg}, at character {error.pos}") from None
    except (ValueError, RecursionError) as error:
        # The body is no UTF-8, has a number of thousands of digits, or is nested too deeply.
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def _validated(found: Any, body_type: type[AnyBody]) -> AnyBody:
    if isinstance(found, dict):
        # pydantic would make an error of each unknown name.
        for name in found.keys() - body_type.model_fields.keys():
            raise misshapen({"type": "extra_forbidden"}, [name])
    try:
        return body_type.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise misshapen(first, first["loc"]) from None


def _completion(body: CompletionBody, model: ServedModel, limits: Limits) -> Prepared:
    with body.naming():
        params = _params(body, len(body.prompts), model, limits)
        prompts = [model.prompt_ids(prompt) for prompt in body.prompts]
        params = _checked(body, prompts, params, model, limits)
        return _prepared(
            body,
            prompts,
            params,
            body.structure_name,
            num_logprobs=body.logprobs,
            num_given=body.n or 1,
            echoes=[model.text_of("prompt", prompt) for prompt in prompts] if body.echo else None,
            gives_output=not body.is_only_echo,
        )


def _chat(body: ChatBody, model: ServedModel, limits: Limits) -> Prepared:
    with body.naming():
        tooling = _tooling_of(body, model)
        params = _params(body, 1, model, limits, tooling)
        variables = body.template_variables | tooling.variables
        prompts = [model.chat_ids(readable(body.messages), variables)]
        params = _checked(body, prompts, params, model, limits)
        return _prepared(
            body,
            prompts,
            params,
            _structure_name(body, params, tooling),
            num_logprobs=params.logprobs,
            reader=tooling.reader,
            tool_name=tooling.tool_name,
        )


def _tooling_of(body: ChatBody, model: ServedModel) -> _Tooling:
    """Raises ApiError and InvalidRequest if this model makes no calls."""
    tools = body.called_tools
    if not tools:
        return _Tooling()
    template = model.tool_template
    variables = {"tools": [tool.model_dump(exclude_none=True) for tool in tools]}
    if isinstance(body.tool_choice, ChosenTool):
        return _Tooling(variables, NamedReader.kind, body.tool_choice.function.name)
    if body.tool_choice == "required":
        return _Tooling(variables, JsonReader.kind)
    is_special = model.is_special(HERMES_OPEN)
    family = family_of(template, is_special)
    structure = family.structure(tools, body.parallel_tool_calls is False)
    return _Tooling(variables, family.reader.kind, "", structure, is_special)


def _params(
    body: CompletionBody | ChatBody,
    num_prompts: int,
    model: ServedModel,
    limits: Limits,
    tooling: _Tooling | None = None,
) -> SamplingParams:
    tooling = tooling or _Tooling()
    model.check_name(body.model)
    limits.check_counts(body.stop_token_ids, body.logit_bias)
    params = body.sampling_params()
    if params.structured_outputs is None:
        params.structured_outputs = tooling.structure
    if tooling.shows_special_tokens:
        params.skip_special_tokens = False
    limits.check(num_prompts, params)
    check_size(limits, params, _structure_name(body, params, tooling))
    return params


def _structure_name(body: CompletionBody | ChatBody, params: SamplingParams, tooling: _Tooling) -> str:
    """Returns the name of the parameter that prescribes the form of the output."""
    is_of_tools = tooling.structure is not None and params.structured_outputs is tooling.structure
    return "tools" if is_of_tools else body.structure_name


def _checked(
    body: CompletionBody | ChatBody,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    model: ServedModel,
    limits: Limits,
) -> SamplingParams:
    """Returns `params` with no more tokens than there is room for."""
    lengths = list(map(len, prompts))
    limits.check_prompts(lengths, params)
    for prompt in prompts:
        model.check(prompt, params)
    return limits.with_room_for_logprobs(lengths, params, _num_kept(body, params), model.max_model_len)


def _num_kept(body: CompletionBody | ChatBody, params: SamplingParams) -> int | None:
    """Returns the number of likeliest tokens whose log-probabilities are kept until the answer is complete."""
    if body.stream:
        return None
    if isinstance(body, CompletionBody):
        return None if body.is_only_echo else body.logprobs
    return params.logprobs


def _prepared(
    body: CompletionBody | ChatBody,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    structure_name: str,
    **shown: Any,
) -> Prepared:
    return Prepared(
        prompts=[array(_ID, prompt).tobytes() for prompt in prompts],
        params=params,
        is_chat=isinstance(body, ChatBody),
        structure_name=structure_name,
        is_stream=bool(body.stream),
        includes_usage=body.includes_usage,
        service_tier=body.service_tier,
        ttft_ms=body.slo.ttft_ms if body.slo else None,
        tbt_ms=body.slo.tbt_ms if body.slo else None,
        cache_salt=body.cache_salt or "",
        num_prompt_logprobs=body.prompt_logprobs,
        **shown,
    )


Endpoint = tuple[type[BaseModel], Callable[[Any, ServedModel, Limits], Result]]
ENDPOINTS: dict[str, Endpoint] = {
    "/v1/completions": (CompletionBody, _completion),
    "/v1/chat/completions": (ChatBody, _chat),
    "/tokenize": (TokenizeBody, tokenized),
    "/detokenize": (DetokenizeBody, detokenized),
}
