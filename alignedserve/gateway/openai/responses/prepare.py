"""Makes the call of a response from a valid body."""

from __future__ import annotations

import json
from typing import Any

from msgspec.structs import replace

from alignedserve.gateway.generation.call import Call
from alignedserve.gateway.generation.chat import chat_call, count_prompt
from alignedserve.gateway.generation.endpoint import (
    Beside,
    ConversationNeeded,
    DirectAnswer,
    Expands,
    Needed,
)
from alignedserve.gateway.http.json_pieces import encode
from alignedserve.gateway.http.reading import too_large
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.openai.responses.body import ResponseBody
from alignedserve.gateway.openai.responses.builder import ResponseSpec, new_response_id
from alignedserve.gateway.openai.responses.items import Items, index_of, kept_json, stem_in
from alignedserve.types import InvalidRequest


def response(
    body: ResponseBody, model: ServedModel, limits: CallLimits, beside: Beside
) -> Call[ResponseSpec]:
    """Returns the call of a response. Raises ApiError, InvalidRequest and Expands."""
    with body.naming():
        if body.background and body.store is False:
            raise InvalidRequest("background: a response in the background has to be stored")
        response_id = new_response_id()
        items, kept = items_of(body, beside, stem_in(body.conversation_id or response_id))
        input_items, repeated = b",".join(item for _, item in kept), _written(_repeated(body))
        if len(input_items) + len(repeated) > limits.max_body_bytes:
            # A number of three characters may become one of twenty.
            raise too_large(limits.max_body_bytes, "as it would be stored, ")
        spec = ResponseSpec(
            response_id=response_id,
            repeated=repeated,
            input_items=input_items,
            item_index=index_of([(name, len(item)) for name, item in kept]),
            is_stored=body.store is not False,
            is_background=bool(body.background),
            previous_response_id=body.previous_response_id,
            conversation_id=body.conversation_id,
            num_logprobs=body.num_logprobs,
        )
        call = chat_call(body, body.conversation_of(items.all), model, limits, spec)
        return replace(call, ignored=call.ignored + _foreign_tools(body))


def input_tokens(body: ResponseBody, model: ServedModel, limits: CallLimits, beside: Beside) -> DirectAnswer:
    """Returns the number of tokens of the prompt of this call, which need not fit. Raises ApiError, InvalidRequest and
    Expands."""
    with body.naming():
        items, _ = items_of(body, beside)
        num_tokens, ignored = count_prompt(body, body.conversation_of(items.all), model)
        found = {"object": "response.input_tokens", "input_tokens": num_tokens}
        return DirectAnswer(memoryview(encode(found)), ignored + _foreign_tools(body))


def items_of(
    body: ResponseBody, beside: Beside, stem: str | None = None
) -> tuple[Items, list[tuple[str, bytes]]]:
    """Returns the items of the conversation with those of the call, and the stored form of the latter. Raises
    ConversationNeeded, InvalidRequest and Expands."""
    # Stored items came from clients, and are parsed like theirs.
    stored = json.loads(beside.earlier or b"{}")
    if "items" not in stored and (needed := _needed(body)):
        raise ConversationNeeded(needed)
    items = Items(stored.get("items", ()), stored.get("referred"), stem)
    kept = items.add(body.input, in_full=body.conversation is not None)
    if items.missing:
        raise ConversationNeeded(Needed("input", item_ids=[*items.missing]))
    if beside.room is not None and items.num_added_bytes > beside.room:
        raise Expands(items.num_added_bytes)
    return items, kept


def _foreign_tools(body: ResponseBody) -> list[str]:
    """Returns the names of tools that OpenAI's servers run themselves."""
    return [f"tools.{kind}" for kind in dict.fromkeys(body.other_tools)]


def _needed(body: ResponseBody) -> Needed | None:
    """Returns what the call continues. Raises InvalidRequest."""
    if body.conversation_id is None:
        previous = body.previous_response_id
        return None if previous is None else Needed("previous_response_id", previous)
    if body.previous_response_id is not None:
        raise InvalidRequest("conversation: not together with previous_response_id")
    return Needed("conversation", body.conversation_id)


def _written(repeated: dict[str, Any]) -> bytes:
    """Raises InvalidRequest."""
    members = (encode(name) + b":" + kept_json(name, value) for name, value in repeated.items())
    return b"{%b}" % b",".join(members)


def _repeated(body: ResponseBody) -> dict[str, Any]:
    reasoning, form = body.reasoning, body.text and body.text.format
    choice = body.tool_choice
    return {
        "background": bool(body.background),
        "conversation": None if body.conversation is None else {"id": body.conversation_id},
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "safety_identifier": body.safety_identifier,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
        "tool_choice": "auto" if choice is None else choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
