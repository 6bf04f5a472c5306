"""Errors for a file that is not a valid job."""

from __future__ import annotations

import json
from typing import Any

import pytest

from alignedserve.batch.config import MAX_LINES
from alignedserve.batch.job import Invalid, Valid
from alignedserve.batch.lines import LineSplitter
from alignedserve.batch.parse import LineProblem, Wrong, parse
from alignedserve.batch.validate import MAX_PROBLEM_CHARS, MAX_PROBLEMS, Validator
from alignedserve.store.records import Problem

URL = "/v1/completions"


def line(number: int = 1, **changed: Any) -> dict[str, Any]:
    whole = {"custom_id": f"q{number}", "method": "POST", "url": URL, "body": {"model": "demo"}}
    return whole | changed


def result_of(*lines: Any) -> Valid | Invalid:
    return checked("".join(json.dumps(each) + "\n" for each in lines).encode())[0]


def checked(content: bytes) -> tuple[Valid | Invalid, int]:
    """The result, and the lines that were looked at for it."""
    validator, number = Validator(URL, ["demo", "adapter"]), 0
    for found in LineSplitter().feed(content):
        number = found.number
        try:
            validator.add(number, parse(found.text, number))
        except LineProblem as error:
            validator.add(number, error.wrong)
        if validator.is_enough:
            break
    return validator.result(), number


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
    # the rest is not even looked at
    assert checked(b"x\n" * 500_000)[1] == MAX_PROBLEMS
    content = "".join(json.dumps(line(number)) + "\n" for number in range(MAX_LINES + 5))
    result, _ = checked(content.encode())
    assert isinstance(result, Invalid) and [each.code for each in result.problems] == ["too_many_lines"]


def test_a_body_is_found_and_not_looked_into() -> None:
    body = b'{"messages": [1, 1.5e999999, {"a": {}}], "model": "demo", "x": "}\\"{"}'
    text = b'{"custom_id": "{}", "body" : ' + body + b' , "method": "POST", "url": "u"}'
    found = parse(text, 1)
    assert text[found.start : found.end] == body
    assert (found.custom_id, found.method, found.url, found.model) == ("{}", "POST", "u", "demo")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"messages": [1,}', "invalid_json_line"),
        (b'{"a": "\xff"}', "invalid_json_line"),
        (b'{"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "invalid_json_line"),
        (b"[1]", "invalid_type"),
        (b'"text"', "invalid_type"),
        (b'{"model": 7}', "invalid_type"),
    ],
)
def test_what_can_be_no_body_is_told(body: bytes, code: str) -> None:
    with pytest.raises(LineProblem) as error:
        parse(b'{"custom_id": "a", "method": "POST", "url": "u", "body": ' + body + b"}", 3)
    assert [(each.code, each.line) for each in error.value.wrong.problems] == [(code, 3)]


def test_all_mistakes_of_a_line_are_told() -> None:
    found = result_of(line(1), line(1, method="GET", url="/v1/nothing", body=[], priority=1))
    assert isinstance(found, Invalid) and {each.line for each in found.problems} == {2}
    assert sorted(each.code for each in found.problems) == [
        "duplicate_custom_id",
        "invalid_method",
        "invalid_type",
        "invalid_url",
        "unknown_parameter",
    ]
    empty = result_of({"custom_id": "", "body": {"model": 7}})
    assert isinstance(empty, Invalid)
    assert [each.param for each in empty.problems] == ["method", "url", "custom_id", "body.model"]


def test_an_adapter_is_a_model_that_a_batch_may_have() -> None:
    lines = [line(number, body={"model": "adapter"}) for number in range(3)]
    assert result_of(*lines) == Valid(3, "adapter")
    mixed = result_of(*lines, line(3))
    assert isinstance(mixed, Invalid) and [each.code for each in mixed.problems] == ["mismatched_model"]
    unknown = result_of(line(0, body={"model": "x"}))
    assert isinstance(unknown, Invalid) and unknown.problems[0].message.endswith("has 'demo', 'adapter'")


def test_no_line_is_looked_at_after_the_first_that_is_too_many() -> None:
    validator = Validator(URL, ["demo"])
    problem = Problem("invalid_method", "no")
    validator._num_lines = MAX_LINES - 1
    validator.add(MAX_LINES, parse(json.dumps(line(MAX_LINES)).encode(), MAX_LINES))
    assert not validator.is_enough
    validator.add(MAX_LINES + 1, Wrong([problem]))
    assert validator.is_enough
    found = validator.result()
    assert isinstance(found, Invalid)
    assert [each.code for each in found.problems] == ["too_many_lines", problem.code]
