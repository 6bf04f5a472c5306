"""A chat after parsing, in one form for all APIs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.gateway.chat.templating import template_variables
from alignedserve.gateway.generation.body import GenerationBody
from alignedserve.gateway.tools.bodies import Tool, ToolChoice


@dataclass(frozen=True)
class Conversation:
    # In the form of OpenAI's chat completions, which templates expect.
    messages: Sequence[dict[str, Any]]
    # The tools that the model may call.
    tools: Sequence[Tool] = ()
    choice: ToolChoice = "auto"
    one_call_at_most: bool = False
    # Reasoning effort, if the template supports it. "none": no reasoning.
    effort: str | None = None


class ConversationBody(GenerationBody):
    """The fields of all chat bodies, in addition to those of all calls."""

    chat_template_kwargs: dict[str, Any] | None = None
    # vLLM's field: false removes reasoning from the answer. SGLang's field: false leaves reasoning in the content.
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    # vLLM's field: false if the answer continues the last message.
    add_generation_prompt: bool | None = None

    def template_variables(self, effort: str | None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.add_generation_prompt is not None:
            found["add_generation_prompt"] = self.add_generation_prompt
        return found | template_variables(self.chat_template_kwargs, effort)
