"""The output of a response as it grows: its items, one after another, and their events."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final

from alignedserve.gateway.http.json_pieces import Json, Piece, encode
from alignedserve.gateway.openai.responses.items import index_of, new_id, new_stem
from alignedserve.gateway.openai.responses.output_items import (
    CallItem,
    Message,
    OutputItem,
    ReasoningItem,
    TextItem,
)
from alignedserve.gateway.openai.responses.written import Event, StoredSpan, object_pieces
from alignedserve.gateway.tools.readers import CallPiece, ContentPiece, Read, ThoughtPiece

# Places per item, in the bytes of all items: its start, start and end of its text, start and end of its
# log-probabilities (both at the text's end if there are none), and its end.
PLACES = 6
# Their type: eight bytes each.
PLACE: Final = "q"


class Output:
    def __init__(self, stem: str | None = None) -> None:
        """`stem` is that of the response's id."""
        self._stem = stem or new_stem()
        # The items that have ended, as JSON with commas between them.
        self._done: list[Piece] = []
        self._places = array(PLACE)
        # Their ids.
        self._ids: list[str] = []
        self._num_bytes = 0
        self._open: OutputItem | None = None
        # Log-probabilities of tokens without text so far, as JSON without the brackets.
        self._waiting = bytearray()
        self._call_ids: set[str] = set()
        # Bytes of log-probabilities in the items that have ended.
        self.num_logprob_bytes = 0

    @property
    def items(self) -> Sequence[Piece]:
        """The items that have ended, as JSON with commas between them."""
        return self._done

    def index(self) -> bytes:
        """Returns the index of the items without log-probabilities. See items.index_of."""
        kept = []
        for number, name in enumerate(self._ids):
            at = PLACES * number
            begin, _, _, logprobs_begin, logprobs_end, end = self._places[at : at + PLACES]
            kept.append((name, end - begin - (logprobs_end - logprobs_begin)))
        return index_of(kept)

    @property
    def num_bytes(self) -> int:
        """Bytes of the items that have ended."""
        return self._num_bytes

    @property
    def places(self) -> bytes:
        """The places in these: PLACES numbers per item."""
        return self._places.tobytes()

    def add(self, read: Read, logprobs: Sequence[Json], is_thought: bool = False) -> Iterator[Event]:
        """Adds what was read, and yields its events. `logprobs` are those of the tokens that were read. Each belongs to
        the message with its text, which may come later, or to no message if it `is_thought`. Must be iterated to its
        end."""
        if is_thought:
            # The waiting log-probabilities are those of the mark that opens the reasoning.
            self._waiting.clear()
        is_said = any(isinstance(part, ContentPiece) for part in read.parts)
        for part in read.parts:
            match part:
                case ThoughtPiece(text):
                    yield from self._go_on(ReasoningItem, "reasoning", text, b"")
                case ContentPiece(text):
                    # The first content gets all of them.
                    self._wait(logprobs)
                    logprobs = ()
                    waiting, self._waiting = bytes(self._waiting), bytearray()
                    yield from self._go_on(Message, "message", text, waiting)
                case CallPiece():
                    yield from self._call(part)
        if not (is_said or is_thought):
            self._wait(logprobs)
        if isinstance(self._open, CallItem):
            self._waiting.clear()

    def finish(self, status: str) -> Iterator[Event]:
        """Does `end`. Output without any item gets an empty message, as in OpenAI's API. Must be iterated to its
        end."""
        if not self._ids and self._open is None:
            yield from self._begin(Message(0, self._new_id("message")))
        yield from self.end(status)

    def end(self, status: str) -> Iterator[Event]:
        """Ends the open item, and yields its events. Must be iterated to its end."""
        if self._open:
            waiting, self._waiting = bytes(self._waiting), bytearray()
            if waiting and isinstance(self._open, Message):
                yield self._open.add(b"", waiting)
            yield from self._open.ended(status)
            self._keep(self._open, status)
            self._open = None

    def _wait(self, logprobs: Sequence[Json]) -> None:
        more = encode(logprobs)[1:-1]
        if self._waiting and more:
            self._waiting += b","
        self._waiting += more

    def _keep(self, item: OutputItem, status: str) -> None:
        if self._ids:
            self._done.append(b",")
            self._num_bytes += 1
        begin = self._num_bytes
        text = logprobs = (begin, begin)
        for piece in object_pieces(item.body(status)):
            assert not isinstance(piece, StoredSpan)
            end = self._num_bytes + len(piece)
            if piece is item.text:
                text, logprobs = (self._num_bytes, end), (end, end)
            elif piece is item.logprobs:
                logprobs = self._num_bytes, end
            self._done.append(piece)
            self._num_bytes = end
        self._places.extend((begin, *text, *logprobs, self._num_bytes))
        self.num_logprob_bytes += logprobs[1] - logprobs[0]
        self._ids.append(item.id)

    def _call(self, piece: CallPiece) -> Iterator[Event]:
        if piece.name is not None:
            # The waiting log-probabilities belong to the call.
            self._waiting.clear()
            yield from self.end("completed")
            item_id, call_id = self._new_id("function_call"), self._call_id(piece.id)
            yield from self._begin(CallItem(len(self._ids), item_id, name=piece.name, call_id=call_id))
        if piece.arguments and self._open:
            yield self._open.add(_json_text(piece.arguments))

    def _call_id(self, written: str | None) -> str:
        """Keeps an id that the model has written, once per response. The client sends it back with the call's result,
        and the template may show nothing else of the call."""
        call_id = f"call_{secrets.token_hex(12)}" if written is None or written in self._call_ids else written
        self._call_ids.add(call_id)
        return call_id

    def _go_on(self, kind: type[TextItem], name: str, text: str, logprobs: bytes) -> Iterator[Event]:
        if not isinstance(self._open, kind):
            yield from self.end("completed")
            yield from self._begin(kind(len(self._ids), self._new_id(name)))
        assert self._open
        yield self._open.add(_json_text(text), logprobs)

    def _new_id(self, kind: str) -> str:
        return new_id(kind, self._stem, len(self._ids))

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        self._open = item
        yield from item.begun()


def spans_without_logprobs(places: Piece, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields the spans of the items without their log-probabilities, in output of `num_bytes`."""
    found, begin = array(PLACE), 0
    found.frombytes(places)
    for first in range(0, len(found), PLACES):
        logprobs_begin, logprobs_end = found[first + 3 : first + 5]
        if logprobs_end > logprobs_begin:
            yield begin, logprobs_begin
            begin = logprobs_end
    yield begin, num_bytes


def _json_text(text: str) -> bytes:
    """Returns the JSON of a text without its quotes."""
    return encode(text)[1:-1]


def run(events: Iterator[Any]) -> None:
    """Iterates over events that are not sent."""
    for _ in events:
        pass
