from __future__ import annotations

from alignedserve.protocol.sse import EventReader

STREAM = b'data: {"a": "\xe2\x80\xa8"}\r\n\r\n: a comment\nevent: x\ndata:two\n\ndata: [DONE]\n\ndata: cut'
DATA = [b'{"a": "\xe2\x80\xa8"}', b"two", b"[DONE]"]


def test_events_are_the_same_wherever_the_bytes_are_cut() -> None:
    for size in range(1, len(STREAM) + 1):
        reader = EventReader()
        pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
        assert [event for piece in pieces for event in reader.feed(piece)] == DATA
