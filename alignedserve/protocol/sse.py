"""Server-sent events, as OpenAI's API streams them: parses their data from bytes that arrive in pieces of any size."""

from __future__ import annotations


class EventReader:
    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the data of the lines that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
