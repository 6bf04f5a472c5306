"""Parses multipart/form-data as it arrives. A field is yielded as a value, a file in pieces, and neither waits for the
other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from alignedserve.gateway.http.errors import ApiError

# Bytes of all fields that are no file, together.
MAX_FIELD_BYTES = 64 << 10
# Longest header with the boundary, in characters: parsing takes the square of its length.
MAX_TYPE_CHARS = 1024
# Parts that a form may have. OpenAI's has four.
MAX_PARTS = 16
# Bytes that are parsed at a time. The parser takes up to 0.5 us per byte if content resembles a boundary.
PIECE_BYTES = 16 << 10


@dataclass(frozen=True)
class Field:
    name: str
    value: str


@dataclass(frozen=True)
class FileStart:
    name: str
    filename: str


@dataclass(frozen=True)
class FileData:
    """A piece of the file that started last."""

    data: bytes


Event = Field | FileStart | FileData


async def form_events(http: Request) -> AsyncIterator[Event]:
    """Yields fields and pieces as they arrive. Raises ApiError if the body is no such form."""
    content_type = http.headers.get("content-type", "")
    if len(content_type) > MAX_TYPE_CHARS:
        raise ApiError(
            400,
            f"the body must be multipart/form-data, with a Content-Type of at most {MAX_TYPE_CHARS} characters",
        )
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise ApiError(400, "the body must be multipart/form-data")
    form = _Form(options[b"boundary"])
    async for data in http.stream():
        for begin in range(0, len(data), PIECE_BYTES):
            for event in form.feed(data[begin : begin + PIECE_BYTES]):
                yield event
            # Other requests get their turn.
            await asyncio.sleep(0)
    form.end()


class _Form:
    def __init__(self, boundary: bytes) -> None:
        self._events: list[Event] = []
        self._header_name = b""
        self._header_value = b""
        self._disposition = b""
        # The name of the field that is being read. None in a file.
        self._name: str | None = None
        self._value = b""
        self._num_field_bytes = 0
        self._num_parts = 0
        self._is_over = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begin,
                    "on_header_field": self._header_field,
                    "on_header_value": self._header_data,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_finished,
                    "on_part_data": self._part_data,
                    "on_part_end": self._part_end,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _misshapen(str(error)) from None

    def feed(self, data: bytes) -> list[Event]:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _misshapen(str(error)) from None
        found, self._events = self._events, []
        return found

    def end(self) -> None:
        if not self._is_over:
            raise _misshapen("it ends in the middle")

    # ---- callbacks of the parser ----

    def _part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _misshapen(f"it has more than {MAX_PARTS} parts")
        self._disposition = self._value = b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _header_data(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _headers_finished(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise _misshapen("a part has no name")
        name = options[b"name"].decode(errors="replace")
        if b"filename" in options:
            self._name = None
            self._events.append(FileStart(name, options[b"filename"].decode(errors="replace")))
        else:
            self._name = name

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name is None:
            self._events.append(FileData(data[start:end]))
            return
        self._num_field_bytes += end - start
        if self._num_field_bytes > MAX_FIELD_BYTES:
            raise _misshapen(f"fields without a filename have more than {MAX_FIELD_BYTES} bytes")
        self._value += data[start:end]

    def _part_end(self) -> None:
        if self._name is not None:
            self._events.append(Field(self._name, self._value.decode(errors="replace")))

    def _end(self) -> None:
        self._is_over = True


def _misshapen(reason: str) -> ApiError:
    return ApiError(400, f"the body is not valid multipart/form-data: {reason}")
