"""Whether a file is one that can be a job: line by line, before any of them runs. What a body holds is not looked at,
but for its model: a body that is wrong is answered so in its place, and hurts no other.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from alignedserve.batch.config import MAX_LINE_BYTES, MAX_LINES
from alignedserve.batch.job import Invalid, Valid
from alignedserve.batch.lines import Line
from alignedserve.store import Problem
from alignedserve.types import shortened

# so many are told
MAX_PROBLEMS = 100
MAX_PROBLEM_CHARS = 300
MAX_CUSTOM_ID_CHARS = 512


@dataclass(frozen=True)
class BatchLine:
    number: int
    custom_id: str
    body: dict[str, Any]


class Validator:
    def __init__(self, endpoint: str, served_model: str) -> None:
        self._endpoint = endpoint
        self._served_model = served_model
        self._model: str | None = None
        self._num_lines = 0
        # of custom_ids: 16 bytes each, however long they are
        self._seen: set[bytes] = set()
        self._problems: list[Problem] = []

    @property
    def is_enough(self) -> bool:
        """What follows would change nothing any more."""
        return len(self._problems) >= MAX_PROBLEMS or self._num_lines > MAX_LINES

    def add(self, line: Line) -> None:
        self._num_lines += 1
        problem = self._problem(line)
        if problem:
            self._problems.append(_shortened(problem))

    def result(self) -> Valid | Invalid:
        if self._num_lines > MAX_LINES:
            message = f"the file has more than {MAX_LINES} lines"
            self._problems.insert(0, Problem("too_many_lines", message))
        if not self._num_lines:
            self._problems.append(Problem("empty_file", "the file has no lines"))
        if self._problems:
            return Invalid(self._problems[:MAX_PROBLEMS])
        return Valid(self._num_lines, self._model)

    def _problem(self, line: Line) -> Problem | None:
        try:
            parsed = parse(line)
        except LineProblem as error:
            return error.problem
        number = line.number
        if parsed["method"] != "POST":
            return Problem("invalid_method", f"method={parsed['method']!r}: must be 'POST'", number, "method")
        if parsed["url"] != self._endpoint:
            message = f"url={parsed['url']!r}: the batch's endpoint is {self._endpoint!r}"
            return Problem("invalid_url", message, number, "url")
        return self._duplicate(parsed["custom_id"], number) or self._other_model(parsed["body"], number)

    def _duplicate(self, custom_id: str, number: int) -> Problem | None:
        digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._seen:
            message = f"custom_id={custom_id!r}: another line has it too"
            return Problem("duplicate_custom_id", message, number, "custom_id")
        self._seen.add(digest)
        return None

    def _other_model(self, body: dict[str, Any], number: int) -> Problem | None:
        model = body.get("model")
        if model is None:
            model = self._served_model
        if self._model is None:
            self._model = model if isinstance(model, str) else None
        elif model != self._model:
            message = f"model={model!r}: lines before have {self._model!r}, and a batch has one model"
            return Problem("mismatched_model", message, number, "body.model")
        if model != self._served_model:
            message = f"model={model!r}: does not exist; this server has {self._served_model!r}"
            return Problem("model_not_found", message, number, "body.model")
        return None


def _shortened(problem: Problem) -> Problem:
    """A job's record holds them, and is read again and again; what they quote may be as long as a line."""
    param = problem.param and shortened(problem.param, MAX_PROBLEM_CHARS)
    return replace(problem, message=shortened(problem.message, MAX_PROBLEM_CHARS), param=param)


class LineProblem(ValueError):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


_KINDS = {"custom_id": str, "method": str, "url": str, "body": dict}
_NAMES = {str: "a string", dict: "an object"}


def parse(line: Line) -> dict[str, Any]:
    """Its custom_id, method, url and body, of the right kinds. Raises LineProblem."""
    if line.text is None:
        message = f"the line is longer than {MAX_LINE_BYTES} bytes"
        raise LineProblem(Problem("line_too_long", message, line.number))
    try:
        found = msgspec.json.decode(line.text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineProblem(
            Problem("invalid_json_line", f"this line is not JSON: {error}", line.number)
        ) from None
    if not isinstance(found, dict):
        raise LineProblem(Problem("invalid_json_line", "this line is JSON, but not an object", line.number))
    for name, kind in _KINDS.items():
        if name not in found:
            message = f"{name}: is missing"
            raise LineProblem(Problem("missing_required_parameter", message, line.number, name))
        if not isinstance(found[name], kind):
            message = f"{name}: must be {_NAMES[kind]}"
            raise LineProblem(Problem("invalid_type", message, line.number, name))
    if not 0 < len(found["custom_id"]) <= MAX_CUSTOM_ID_CHARS:
        message = f"custom_id: must have 1 to {MAX_CUSTOM_ID_CHARS} characters"
        raise LineProblem(Problem("invalid_custom_id", message, line.number, "custom_id"))
    if unknown := found.keys() - _KINDS.keys():
        message = f"{min(unknown)}: unknown"
        raise LineProblem(Problem("unknown_parameter", message, line.number, min(unknown)))
    return found


def batch_line(line: Line) -> BatchLine:
    """Of a file that has been found valid."""
    found = parse(line)
    return BatchLine(line.number, found["custom_id"], found["body"])
