"""What the result of a line says that was not answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from alignedserve.batch.results import BatchLine, cancelled, fallen, not_stored, too_late
from alignedserve.store import LineResult

LINE = BatchLine(3, "q3", b"{}")


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (too_late, "batch_expired", "before the completion window expired"),
        (cancelled, "batch_cancelled", "the batch was cancelled"),
        (partial(fallen, count=2), "line_failed", "begun 2 times"),
        (not_stored, "storage_full", "could not be stored"),
    ],
)
def test_a_line_without_an_answer_says_why(
    make: Callable[[BatchLine], LineResult], code: str, words: str
) -> None:
    result = make(LINE)
    assert result.is_error
    said: dict[str, Any] = json.loads(result.text)
    assert said["custom_id"] == "q3" and said["response"] is None
    assert said["error"]["code"] == code and words in said["error"]["message"]
