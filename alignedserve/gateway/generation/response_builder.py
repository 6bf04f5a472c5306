"""What makes an API's answer of a call's deltas: whole, or as the events of a stream.

Answers can be large: 256 choices, or log-probabilities of half a million tokens. So each delta is added when it comes,
at a cost that does not grow with what came before, and large parts are made in pieces (http/json_pieces.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from alignedserve.gateway.generation.generation import Delta, Usage
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_pieces import Piece


class ResponseBuilder(ABC):
    """An answer is either made whole, by `add` and `whole`, or streamed, by the other methods."""

    @abstractmethod
    def add(self, delta: Delta) -> None: ...

    @abstractmethod
    def whole(self, usage: Usage) -> Iterator[Piece]:
        """Yields the answer, after everything has been added."""

    def progress(self, delta: Delta, usage: Usage) -> bytes:
        """Returns the event that says how far a prompt is, where an API has one."""
        return b""

    @abstractmethod
    def opening(self, delta: Delta, usage: Usage) -> Iterable[Piece] | None:
        """Returns the events that go before those of `delta`, if there are any. They may be large. `usage` is that
        up to and with this delta."""

    @abstractmethod
    def events(self, delta: Delta, usage: Usage) -> bytes | Iterable[Piece]:
        """Returns the events of new tokens, in pieces where they may be large; none, for a token without text."""

    @abstractmethod
    def end(self, usage: Usage) -> Iterable[Piece]:
        """Returns the events after the last delta."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes | Iterable[Piece]:
        """Returns the events that end a stream which can't go on."""
