"""Makes the answer of an API from a call's deltas: whole, or as the events of a stream.

Answers can be large: 256 choices, or log-probabilities of half a million tokens. So each delta is added when it
arrives, at a cost that does not grow with the answer so far. Large parts are made in pieces (http/json_pieces.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from alignedserve.gateway.generation.generation import ChoiceDelta, TokenUsage
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_pieces import Piece


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
