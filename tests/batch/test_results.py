"""What the result of a line says that was not answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from alignedserve.batch.results import BatchLine, cancelled, fallen, not_stored, too_late
from alignedserve.store import LineResult

LINE = BatchLine(3, "q3", b"{}")


@pytest.mark.parametrize(
    ("result", "code", "words"),
    [
        (too_late(LINE), "batch_expired", "before the completion window expired"),
        (cancelled(LINE), "batch_cancelled", "the batch was cancelled"),
        (fallen(LINE, 2), "line_failed", "begun 2 times"),
        (not_stored(LINE), "storage_full", "could not be stored"),
    ],
)
def test_a_line_without_an_answer_says_why(result: LineResult, code: str, words: str) -> None:
    assert result.is_error
    said: dict[str, Any] = json.loads(result.text)
    assert said["custom_id"] == "q3" and said["response"] is None
    assert said["error"]["code"] == code and words in said["error"]["message"]
