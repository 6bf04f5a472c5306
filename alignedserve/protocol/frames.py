"""Messages on the wire: four bytes of length, most significant first, then that many bytes of msgpack.

Frames begin after the handshake (`handshake.py`), so no byte from a process without the token gets here.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from alignedserve.protocol.handshake import digest_of
from alignedserve.protocol.messages import AnyMessage, Message

_LENGTH_BYTES = 4
# A prompt of a million tokens takes five MB. A longer frame is not one of our messages.
MAX_FRAME_BYTES = 64 << 20

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


class WireError(ValueError):
    """The received bytes are not one of our messages. The connection can't be used any more."""


def frame(message: Message) -> bytes:
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(
            f"{type(message).__name__} of {len(body)} bytes: a message has at most {MAX_FRAME_BYTES}"
        )
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class FrameReader:
    """Cuts a stream of bytes into messages."""

    def __init__(self, first_digest: bytes = b"") -> None:
        """`first_digest` is the digest of the first frame, if the handshake gave one."""
        # The most bytes in a frame, without its length.
        self.max_bytes = MAX_FRAME_BYTES
        self._first_digest = first_digest
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[AnyMessage]:
        """Yields the messages that `data` completes. Raises WireError at the first invalid one; no more data may be fed
        after that."""
        self._buffer += data
        while (end := self._end_of_frame()) is not None:
            whole = bytes(self._buffer[:end])
            del self._buffer[:end]
            self._check_first(whole)
            yield _decode(memoryview(whole)[_LENGTH_BYTES:])

    def _end_of_frame(self) -> int | None:
        if len(self._buffer) < _LENGTH_BYTES:
            return None
        length = int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
        if length > self.max_bytes:
            raise WireError(f"a frame of {length} bytes: at most {self.max_bytes} are allowed")
        end = _LENGTH_BYTES + length
        return end if len(self._buffer) >= end else None

    def _check_first(self, whole: bytes) -> None:
        digest, self._first_digest = self._first_digest, b""
        if digest and digest != digest_of(whole):
            raise WireError("the first frame does not match the digest of the handshake")


def _decode(body: memoryview) -> AnyMessage:
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a frame of {len(body)} bytes is not a message: {error}") from error
