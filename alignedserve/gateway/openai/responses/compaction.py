"""`/v1/responses/compact`: a conversation becomes its user messages and a summary, which the model writes.

The item with the summary is encoded, and not encrypted: it holds only the client's own conversation, and a client
may send any message anyway. So nothing of it is kept here.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from alignedserve.gateway.generation.call import Call, CallContext, ChoiceDelta, TokenUsage
from alignedserve.gateway.generation.chat import chat_call
from alignedserve.gateway.generation.endpoint import Beside
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_pieces import Piece, encode, object_of
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.openai.responses.body import ResponseBody
from alignedserve.gateway.openai.responses.builder import ResponsesBuilder, ResponseSpec
from alignedserve.gateway.openai.responses.items import Item, completed, kept_json, new_id
from alignedserve.gateway.openai.responses.prepare import items_of
from alignedserve.gateway.tools.readers import CollectedText
from alignedserve.types import InvalidRequest

# Tokens of a summary, with the reasoning before it.
MAX_SUMMARY_TOKENS = 4096
_ASKED = (
    "Summarize this conversation so far, so that you can continue it from the summary alone. Keep decisions, facts, "
    "names, numbers, results of tools, and what is still to be done. Write nothing but the summary."
)


class CompactBody(ResponseBody):
    """The body of a response, as far as it says what the conversation is."""

    input: str | list[Any] = Field(default_factory=list)


class CompactionSpec(ResponseSpec, frozen=True, kw_only=True):
    # The user's messages, as JSON with commas between them.
    asked: bytes

    def builder(self, answering: CallContext) -> CompactionBuilder:
        return CompactionBuilder(answering, self)


@dataclass
class CompactionBuilder(ResponsesBuilder):
    spec: CompactionSpec
    _collected: CollectedText = field(default_factory=CollectedText)
    _is_too_long: bool = False

    def add(self, delta: ChoiceDelta) -> None:
        self._collected.add(self._reader.feed(delta.text))
        if self._reader.is_thinking:
            self._num_reasoning_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._collected.add(self._reader.end(is_cut=delta.is_cut))
            self._is_too_long = delta.finish_reason == "length"

    def whole(self, usage: TokenUsage) -> Iterator[Piece]:
        """Returns the answer. Raises ApiError if the summary is not complete: the conversation would be lost."""
        if self._is_too_long:
            message = (
                f"max_output_tokens: the summary is not complete after {usage.num_completion_tokens} tokens"
            )
            raise ApiError(400, message, param="max_output_tokens")
        summary = self._collected.content.strip()
        if not summary:
            raise ApiError(500, "the model has written no summary")
        head = {"id": self.id, "object": "response.compaction", "created_at": self.answering.created}
        last = encode(compaction_item(summary))
        output = [b"[", self.spec.asked, b"," if self.spec.asked else b"", last, b"]"]
        return object_of(head | {"usage": self._usage(usage)}, {"output": output})


def compaction(
    body: CompactBody, model: ServedModel, limits: CallLimits, beside: Beside
) -> Call[CompactionSpec]:
    """Returns the call that summarizes a conversation. Raises ApiError, InvalidRequest and Expands."""
    with body.naming():
        for name in ("background", "stream"):
            if getattr(body, name):
                raise InvalidRequest(f"{name}=True: not possible for a compaction")
        items = items_of(body, beside)[0].all
        if not items:
            raise InvalidRequest("input: there is nothing to compact")
        body = body.model_copy(
            update={"max_output_tokens": body.max_output_tokens or MAX_SUMMARY_TOKENS, "tool_choice": "none"}
        )
        chat = body.conversation_of(_with_question(items))
        asked = b",".join(kept_json("input", completed(item)) for item in items if _is_asked(item))
        return chat_call(body, chat, model, limits, CompactionSpec(asked=asked))


def compaction_item(summary: str) -> Item:
    return {
        "id": new_id("compaction"),
        "type": "compaction",
        "encrypted_content": base64.b64encode(summary.encode()).decode(),
    }


def _is_asked(item: Item) -> bool:
    return (item["type"], item.get("role")) == ("message", "user")


def _with_question(items: Sequence[Item]) -> list[Item]:
    """Returns the items with the request for a summary. Some templates take no two user messages in a row."""
    question = {"type": "input_text", "text": _ASKED}
    *rest, last = items
    if not _is_asked(last):
        return [*items, {"id": "", "type": "message", "role": "user", "content": [question]}]
    content = last["content"]
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    return [*rest, {**last, "content": [*parts, question]}]
