"""The result of a line without an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from alignedserve.batch.results import (
    BatchLine,
    LineAnswer,
    answered,
    cancelled,
    fallen,
    not_stored,
    too_late,
)
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


MESSAGE = replace(LINE, is_message=True)
FAILURE = {"type": "error", "error": {"type": "not_found_error", "message": "no"}}


@pytest.mark.parametrize(
    ("result", "ending", "said"),
    [
        (too_late(MESSAGE), "expired", {"type": "expired"}),
        (cancelled(MESSAGE), "cancelled", {"type": "canceled"}),
        (answered(MESSAGE, LineAnswer(200, {"a": 1})), None, {"type": "succeeded", "message": {"a": 1}}),
        (answered(MESSAGE, LineAnswer(404, FAILURE)), None, {"type": "errored", "error": FAILURE}),
    ],
)
def test_a_message_batch_has_its_results_in_anthropics_form(
    result: LineResult, ending: str | None, said: dict[str, Any]
) -> None:
    assert json.loads(result.text) == {"custom_id": "q3", "result": said}
    assert result.ending == ending and result.is_error == (said["type"] != "succeeded")


@pytest.mark.parametrize("make", [partial(fallen, count=2), not_stored])
def test_a_message_that_the_server_lost_is_its_error(make: Callable[[BatchLine], LineResult]) -> None:
    result = make(MESSAGE)
    said = json.loads(result.text)["result"]
    assert (said["type"], said["error"]["type"]) == ("errored", "error") and result.ending is None
    error = json.loads(make(LINE).text)["error"]
    assert said["error"]["error"] == {"type": "api_error", "message": error["message"]}
