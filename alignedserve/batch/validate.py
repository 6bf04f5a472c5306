"""Checks line by line whether a file can become a job, before any line runs. A body is not checked, except for its
model. An invalid body is answered with an error and affects no other line."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from alignedserve.batch.config import MAX_LINES
from alignedserve.batch.job import Invalid, Valid
from alignedserve.batch.parse import Parsed, Wrong
from alignedserve.store import Problem
from alignedserve.types import shortened

# The most problems that are reported.
MAX_PROBLEMS = 100
MAX_PROBLEM_CHARS = 300


class Validator:
    def __init__(self, endpoint: str, served_models: Sequence[str]) -> None:
        """`served_models`: the first one applies to lines without a model."""
        self._endpoint = endpoint
        self._served_models = served_models
        self._model: str | None = None
        self._num_lines = 0
        # Digests of all custom_ids: 16 bytes each, however long the ids are.
        self._seen: set[bytes] = set()
        self._problems: list[Problem] = []

    @property
    def is_enough(self) -> bool:
        """Whether further lines cannot change the outcome."""
        return len(self._problems) >= MAX_PROBLEMS or self._num_lines > MAX_LINES

    def add(self, number: int, found: Parsed | Wrong) -> None:
        """Adds the next line: its content, or what is wrong with it."""
        self._num_lines += 1
        own = found.problems if isinstance(found, Wrong) else []
        self._problems += map(_shortened, (*own, *self._problems_of(number, found)))

    def result(self) -> Valid | Invalid:
        if self._num_lines > MAX_LINES:
            message = f"the file has more than {MAX_LINES} lines"
            self._problems.insert(0, Problem("too_many_lines", message))
        if not self._num_lines:
            self._problems.append(Problem("empty_file", "the file has no lines"))
        if self._problems:
            return Invalid(self._problems[:MAX_PROBLEMS])
        return Valid(self._num_lines, self._model)

    def _problems_of(self, number: int, line: Parsed | Wrong) -> Iterator[Problem]:
        """Yields what does not fit the job or other lines."""
        if line.method not in ("POST", None):
            yield Problem("invalid_method", f"method={line.method!r}: must be 'POST'", number, "method")
        if line.url not in (self._endpoint, None):
            message = f"url={line.url!r}: the batch's endpoint is {self._endpoint!r}"
            yield Problem("invalid_url", message, number, "url")
        if line.custom_id is not None and (problem := self._duplicate(line.custom_id, number)):
            yield problem
        if isinstance(line, Parsed) and (problem := self._other_model(line.model, number)):
            yield problem

    def _duplicate(self, custom_id: str, number: int) -> Problem | None:
        digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._seen:
            message = f"custom_id={custom_id!r}: another line has it too"
            return Problem("duplicate_custom_id", message, number, "custom_id")
        self._seen.add(digest)
        return None

    def _other_model(self, model: str | None, number: int) -> Problem | None:
        model = self._served_models[0] if model is None else model
        if self._model is None:
            self._model = model
        elif model != self._model:
            message = f"model={model!r}: lines before have {self._model!r}, and a batch has one model"
            return Problem("mismatched_model", message, number, "body.model")
        if model not in self._served_models:
            served = ", ".join(map(repr, self._served_models))
            message = f"model={model!r}: does not exist; this server has {served}"
            return Problem("model_not_found", message, number, "body.model")
        return None


def _shortened(problem: Problem) -> Problem:
    """Truncates the problem's texts. A problem may quote a whole line, and is part of the job's record, which is read
    often."""
    param = problem.param and shortened(problem.param, MAX_PROBLEM_CHARS)
    return replace(problem, message=shortened(problem.message, MAX_PROBLEM_CHARS), param=param)
