"""A chat as all APIs have it, once it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.gateway.chat.templating import template_variables
from alignedserve.gateway.generation.body import GenerationBody
from alignedserve.gateway.tools.bodies import Tool, ToolChoice


@dataclass(frozen=True)
class Conversation:
    # As OpenAI's chats have them, which is what templates know.
    messages: Sequence[dict[str, Any]]
    # The tools that may be called.
    tools: Sequence[Tool] = ()
    choice: ToolChoice = "auto"
    one_call_at_most: bool = False
    # How long the model thinks, where its template knows that; "none": not at all.
    effort: str | None = None


class ConversationBody(GenerationBody):
    """The fields that chats have in common, beside those of all calls."""

    chat_template_kwargs: dict[str, Any] | None = None
    # vLLM's field, false if the answer is not to show the thoughts; and SGLang's, false if they stay in the content.
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    # vLLM's field, false for a prompt that goes on with the last message.
    add_generation_prompt: bool | None = None

    def template_variables(self, effort: str | None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.add_generation_prompt is not None:
            found["add_generation_prompt"] = self.add_generation_prompt
        return found | template_variables(self.chat_template_kwargs, effort)
