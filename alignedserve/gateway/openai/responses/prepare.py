"""From a valid body to the call of a response."""

from __future__ import annotations

from typing import Any

import msgspec

from alignedserve.gateway.chat.prepare import PreparedChat, chat_fields
from alignedserve.gateway.generation.prepared import Answering
from alignedserve.gateway.limits import Limits
from alignedserve.gateway.model import ServedModel
from alignedserve.gateway.openai.responses.body import ResponseBody
from alignedserve.gateway.openai.responses.builder import ResponsesBuilder
from alignedserve.types import InvalidRequest


class PreparedResponse(PreparedChat, frozen=True, kw_only=True):
    # What the response repeats of the call, as JSON.
    repeated: bytes
    # The items of the call's input, as JSON.
    input_items: bytes
    is_stored: bool
    is_background: bool
    previous_response_id: str | None
    num_logprobs: int | None

    def response_builder(self, answering: Answering) -> ResponsesBuilder:
        return ResponsesBuilder(
            answering,
            msgspec.json.decode(self.repeated),
            self.reading.new_reader,
            self.num_logprobs,
            shows_reasoning=self.shows_reasoning,
        )


def response(body: ResponseBody, model: ServedModel, limits: Limits) -> PreparedResponse:
    """Raises ApiError and InvalidRequest."""
    with body.naming():
        if body.background and body.store is False:
            raise InvalidRequest("background: a response in the background has to be stored")
        if body.previous_response_id is not None and body.earlier_items is None:
            raise InvalidRequest("previous_response_id: not possible in a batch")
        earlier, items = body.items()
        found = chat_fields(body, body.conversation_of([*earlier, *items]), model, limits)
        # Tools that OpenAI's servers run themselves.
        found["ignored"] += [f"tools.{kind}" for kind in dict.fromkeys(body.other_tools)]
        return PreparedResponse(
            **found,
            repeated=msgspec.json.encode(_repeated(body)),
            input_items=msgspec.json.encode(items),
            is_stored=body.store is not False,
            is_background=bool(body.background),
            previous_response_id=body.previous_response_id,
            num_logprobs=body.num_logprobs,
        )


def _repeated(body: ResponseBody) -> dict[str, Any]:
    reasoning, form = body.reasoning, body.text and body.text.format
    choice = body.tool_choice
    return {
        "background": bool(body.background),
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
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
        "tool_choice": "auto" if choice is None else choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
