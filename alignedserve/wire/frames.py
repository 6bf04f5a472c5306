"""A message on the wire: four bytes of length, most significant first, then so many bytes of msgpack."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from alignedserve.messages import AnyMessage, Message

_LENGTH_BYTES = 4
# A prompt of a million tokens takes five; what is longer is no message of ours.
MAX_FRAME_BYTES = 64 << 20

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


class WireError(ValueError):
    """What came is not one of our messages. The connection is of no use any more."""


def frame(message: Message) -> bytes:
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(
            f"{type(message).__name__} of {len(body)} bytes: a message has at most {MAX_FRAME_BYTES}"
        )
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class FrameReader:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[AnyMessage]:
        """The messages that `data` completes. Raises WireError at the first one that is none; feed nothing after it."""
        self._buffer += data
        while (end := self._end_of_frame()) is not None:
            body = bytes(self._buffer[_LENGTH_BYTES:end])
            del self._buffer[:end]
            yield _decode(body)

    def _end_of_frame(self) -> int | None:
        if len(self._buffer) < _LENGTH_BYTES:
            return None
        length = int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
        if length > MAX_FRAME_BYTES:
            raise WireError(f"a frame of {length} bytes: at most {MAX_FRAME_BYTES} are allowed")
        end = _LENGTH_BYTES + length
        return end if len(self._buffer) >= end else None


def _decode(body: bytes) -> AnyMessage:
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a frame of {len(body)} bytes is no message: {error}") from error
