"""Server-sent events, as OpenAI's API streams them: their data, from the bytes in whatever pieces they come."""

from __future__ import annotations


class EventReader:
    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the lines that end in here."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
