"""A streamed answer as received by its client, compared piece by piece with the right one. Pure."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.soak.questions import Answer

DONE = b"[DONE]"


class Transcript:
    def __init__(self, expected: Answer) -> None:
        self._expected = expected
        self._text = ""
        self._finish_reason: str | None = None
        self._num_tokens: int | None = None
        self.is_done = False
        # An error reported by the server.
        self.error = ""
        # The first difference from the right answer.
        self.wrong = ""

    def take(self, event: bytes) -> bool:
        """Takes an event. Returns whether it contained text."""
        if self.is_done:
            self._object(f"{event[:80]!r} after the end")
        if event == DONE:
            self._end()
            return False
        chunk = json.loads(event)
        if "error" in chunk:
            self.error = self.error or str(chunk["error"]["message"])
            return False
        if chunk.get("usage"):
            self._num_tokens = chunk["usage"]["completion_tokens"]
        pieces = [self._take_choice(choice) for choice in chunk["choices"]]
        return any(pieces)

    def _take_choice(self, choice: dict[str, Any]) -> bool:
        if self._finish_reason is not None:
            self._object("more after its last token")
        piece = choice["delta"].get("content") or ""
        self._text += piece
        if not self._expected.text.startswith(self._text):
            self._object(f"{piece!r} after {len(self._text) - len(piece)} characters")
        self._finish_reason = choice["finish_reason"]
        return bool(piece)

    def _end(self) -> None:
        self.is_done = True
        if not self.error:
            said = Answer(self._text, self._num_tokens or 0, str(self._finish_reason))
            self._object(difference(said, self._expected))

    def _object(self, what: str) -> None:
        self.wrong = self.wrong or what


def difference(said: Answer, expected: Answer) -> str:
    """Returns the first difference, or the empty string."""
    if said == expected:
        return ""
    if said.text != expected.text:
        return f"it ends in {said.text[-40:]!r}, not in {expected.text[-40:]!r}"
    return (
        f"{said.num_tokens} tokens, {said.finish_reason}; not {expected.num_tokens}, {expected.finish_reason}"
    )
