"""What a call's answer is made of, and the interface that each API implements to make its own form of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_pieces import Piece
from alignedserve.protocol.messages import PromptProgress
from alignedserve.protocol.prompt_logprobs import TokenLogprobs


@dataclass(frozen=True)
class ChoiceDelta:
    """The new tokens and text of a choice. The first token may have no text yet, and the last delta no tokens."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None
    # The prompt's log-probabilities, packed. If requested, they come with the first token.
    prompt_logprobs: bytes = b""
    # The stop string that ended the choice, with finish_reason "stop".
    stop_string: str | None = None
    # Progress of the prompt. Such a delta has no tokens.
    progress: PromptProgress | None = None
    # The text of each token, if there are several: tokens are joined if they arrive faster than they are sent.
    texts: Sequence[str] = ()

    def steps(self) -> Iterator[tuple[str, int]]:
        """Yields text and its number of tokens, one token at a time where the text of each is known."""
        if self.texts:
            yield from ((text, 1) for text in self.texts)
        else:
            yield self.text, len(self.token_ids)

    @property
    def is_cut(self) -> bool:
        """Whether a length limit or a stop string ended the choice, rather than the model."""
        return self.finish_reason == "length" or self.stop_string is not None


@dataclass
class TokenUsage:
    num_prompt_tokens: int
    num_completion_tokens: int = 0
    # Prompt tokens with KV reused from earlier prompts.
    num_cached_tokens: int = 0

    @property
    def body(self) -> dict[str, Any]:
        prompt, completion = self.num_prompt_tokens, self.num_completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            # OpenAI's API always has this field; vLLM omits it by default.
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


# Answers can be large: 256 choices, or log-probabilities of half a million tokens. So each delta is added when it
# arrives, at a cost that does not grow with the answer so far. Large parts are made in pieces (http/json_pieces.py).


class ResponseBuilder(ABC):
    """An answer is either made whole, by `add` and `whole`, or streamed, by the other methods."""

    @abstractmethod
    def add(self, delta: ChoiceDelta) -> None: ...

    @abstractmethod
    def whole(self, usage: TokenUsage) -> Iterator[Piece]:
        """Yields the answer, after all deltas were added."""

    def progress(self, delta: ChoiceDelta, usage: TokenUsage) -> bytes:
        """Returns the event that reports a prompt's progress, in APIs that have one."""
        return b""

    @abstractmethod
    def opening(self, delta: ChoiceDelta, usage: TokenUsage) -> Iterable[Piece] | None:
        """Returns the events before those of `delta`, if there are any. They may be large. `usage` includes this
        delta."""

    @abstractmethod
    def events(self, delta: ChoiceDelta, usage: TokenUsage) -> bytes | Iterable[Piece]:
        """Returns the events of new tokens, in pieces if they may be large. Empty for a token without text."""

    @abstractmethod
    def end(self, usage: TokenUsage) -> Iterable[Piece]:
        """Returns the events after the last delta."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes | Iterable[Piece]:
        """Returns the events that end a failed stream."""
