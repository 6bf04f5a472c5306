"""Parses the parts of a line that a job needs. The content of its body is skipped, except for the model's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import msgspec

from alignedserve.batch.config import MAX_LINE_BYTES
from alignedserve.store import Problem
from alignedserve.types import shortened

MAX_CUSTOM_ID_CHARS = 512
# The most characters of a text that is compared or reported. A line may consist of one long text.
_MAX_CHARS = 1000


class Wrong(msgspec.Struct, frozen=True):
    """A line that can't run: all that is wrong with it by itself, and those of its texts that can be read."""

    problems: list[Problem]
    custom_id: str | None = None
    method: str | None = None
    url: str | None = None


class LineProblem(ValueError):
    def __init__(self, wrong: Wrong) -> None:
        super().__init__(wrong.problems[0].message)
        self.wrong = wrong


class Parsed(msgspec.Struct, frozen=True):
    custom_id: str
    # Truncated if it is long.
    method: str
    url: str
    # The model that the body names, or None.
    model: str | None
    # The byte range of the body, a JSON object, within the line.
    start: int
    end: int


_KINDS = {"custom_id": "a string", "method": "a string", "url": "a string", "body": "an object"}
_OPENINGS = {"a string": b'"', "an object": b"{"}


class _Body(msgspec.Struct):
    model: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_whole = msgspec.json.Decoder(dict[str, msgspec.Raw])
_body = msgspec.json.Decoder(_Body)
_string = msgspec.json.Decoder(str)


def parse(text: bytes | None, number: int) -> Parsed:
    """Parses a line. `text` is None for one that is too long. The time is linear in the line's length, whatever it
    contains. Raises LineProblem."""
    if text is None:
        message = f"the line is longer than {MAX_LINE_BYTES} bytes"
        raise LineProblem(Wrong([Problem("line_too_long", message, number)]))
    try:
        # The JSON decoder does not check the encoding of skipped values.
        text.decode()
        return _parse(text, number)
    except LineProblem:
        raise
    except msgspec.ValidationError:
        problem = Problem("invalid_json_line", "this line is JSON, but not an object", number)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = Problem("invalid_json_line", f"this line is not JSON: {error}", number)
    raise LineProblem(Wrong([problem]))


def _parse(text: bytes, number: int) -> Parsed:
    found: dict[str, Any] = _whole.decode(text)
    values = {name: bytes(found[name]) for name in _KINDS if name in found}
    problems = [*_problems(found.keys(), values, number)]
    wrong = {each.param for each in problems}
    texts = {
        name: shortened(_string.decode(values[name]), _MAX_CHARS)
        for name, kind in _KINDS.items()
        if kind == "a string" and name not in wrong
    }
    if "custom_id" in texts and not 0 < len(texts["custom_id"]) <= MAX_CUSTOM_ID_CHARS:
        del texts["custom_id"]
        message = f"custom_id: must have 1 to {MAX_CUSTOM_ID_CHARS} characters"
        problems.append(Problem("invalid_custom_id", message, number, "custom_id"))
    body, model = values.get("body", b""), None
    if "body" not in wrong and (raw := _model(body)) is not None:
        if raw.startswith(b'"'):
            model = shortened(_string.decode(raw), _MAX_CHARS)
        else:
            problems.append(Problem("invalid_type", "model: must be a string", number, "body.model"))
    if problems:
        raise LineProblem(Wrong(problems, **texts))
    # The same bytes may occur earlier in the line, for instance in a text. They serve as well.
    start = text.find(body)
    return Parsed(**texts, model=model, start=start, end=start + len(body))


def _problems(names: Set[str], values: Mapping[str, bytes], number: int) -> Iterator[Problem]:
    """Yields what is missing, of another kind or unknown."""
    for name, kind in _KINDS.items():
        if name not in values:
            yield Problem("missing_required_parameter", f"{name}: is missing", number, name)
        elif not values[name].startswith(_OPENINGS[kind]):
            yield Problem("invalid_type", f"{name}: must be {kind}", number, name)
    if unknown := names - _KINDS.keys():
        name = shortened(min(unknown), _MAX_CHARS)
        yield Problem("unknown_parameter", f"{name}: unknown", number, name)


def _model(body: bytes) -> bytes | None:
    """Returns the JSON of the body's model; None if it names none."""
    raw = _body.decode(body).model
    value = None if isinstance(raw, msgspec.UnsetType) else bytes(raw)
    return None if value == b"null" else value
