"""What is said of a file that is no job."""

from __future__ import annotations

import json
from typing import Any

import pytest

from alignedserve.batch.config import MAX_LINES
from alignedserve.batch.job import Invalid, Valid
from alignedserve.batch.lines import LineSplitter
from alignedserve.batch.validate import MAX_PROBLEM_CHARS, MAX_PROBLEMS, Validator

URL = "/v1/completions"


def line(number: int = 1, **changed: Any) -> dict[str, Any]:
    whole = {"custom_id": f"q{number}", "method": "POST", "url": URL, "body": {"model": "demo"}}
    return whole | changed


def result_of(*lines: Any) -> Valid | Invalid:
    validator = Validator(URL, "demo")
    for found in LineSplitter().feed("".join(json.dumps(each) + "\n" for each in lines).encode()):
        validator.add(found)
    return validator.result()


@pytest.mark.parametrize(
    "changed",
    [
        {"body": {"model": "m" * 100_000}},
        {"url": "u" * 100_000},
        {"method": "m" * 100_000},
        {"u" * 100_000: 1},
    ],
)
def test_a_record_does_not_hold_what_a_line_may(changed: dict[str, Any]) -> None:
    found = result_of(line(**changed))
    assert isinstance(found, Invalid)
    problem = found.problems[0]
    assert problem.line == 1 and 50 < len(problem.message) < MAX_PROBLEM_CHARS + 10
    assert len(problem.param or "") < MAX_PROBLEM_CHARS + 10


def test_no_model_is_the_only_one_there_is() -> None:
    assert result_of(line(1, body={"model": None}), line(2), line(3, body={})) == Valid(3, "demo")


def test_enough_is_enough() -> None:
    validator = Validator(URL, "demo")
    lines = LineSplitter().feed(b"x\n" * 500_000)
    for found in lines:
        validator.add(found)
        if validator.is_enough:
            break
    # the rest has not even been looked at
    assert next(lines).number == MAX_PROBLEMS + 1
    many = Validator(URL, "demo")
    for found in LineSplitter().feed(
        "".join(json.dumps(line(n)) + "\n" for n in range(MAX_LINES + 5)).encode()
    ):
        many.add(found)
        if many.is_enough:
            break
    result = many.result()
    assert isinstance(result, Invalid) and [each.code for each in result.problems] == ["too_many_lines"]
