"""OpenAI's text calls, with what their answers show besides the text."""

from __future__ import annotations

from alignedserve.gateway.chat.prepare import PreparedChat
from alignedserve.gateway.generation.prepared import Answering, Prepared
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
