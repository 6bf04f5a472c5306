"""Parses the parts of a line that a job needs. The content of its body is skipped, except for the model's name."""

from __future__ import annotations

from typing import Any

import msgspec

from alignedserve.batch.config import MAX_LINE_BYTES
from alignedserve.store import Problem
from alignedserve.types import shortened

MAX_CUSTOM_ID_CHARS = 512
# The most characters of a text that is compared or reported. A line may consist of one long text.
_MAX_CHARS = 1000


class LineProblem(ValueError):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


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
        raise LineProblem(Problem("line_too_long", message, number))
    try:
        # The JSON decoder does not check the encoding of skipped values.
        text.decode()
        return _parse(text, number)
    except LineProblem:
        raise
    except msgspec.ValidationError:
        raise LineProblem(
            Problem("invalid_json_line", "this line is JSON, but not an object", number)
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineProblem(Problem("invalid_json_line", f"this line is not JSON: {error}", number)) from None


def _parse(text: bytes, number: int) -> Parsed:
    found: dict[str, Any] = _whole.decode(text)
    values = {name: bytes(found[name]) for name in _KINDS if name in found}
    for name, kind in _KINDS.items():
        if name not in values:
            message = f"{name}: is missing"
            raise LineProblem(Problem("missing_required_parameter", message, number, name))
        if not values[name].startswith(_OPENINGS[kind]):
            raise LineProblem(Problem("invalid_type", f"{name}: must be {kind}", number, name))
    custom_id = _string.decode(values["custom_id"])
    if not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        message = f"custom_id: must have 1 to {MAX_CUSTOM_ID_CHARS} characters"
        raise LineProblem(Problem("invalid_custom_id", message, number, "custom_id"))
    if unknown := found.keys() - _KINDS.keys():
        name = shortened(min(unknown), _MAX_CHARS)
        raise LineProblem(Problem("unknown_parameter", f"{name}: unknown", number, name))
    body = values["body"]
    # The same bytes may occur earlier in the line, for instance in a text. They serve as well.
    start = text.find(body)
    return Parsed(
        custom_id,
        shortened(_string.decode(values["method"]), _MAX_CHARS),
        shortened(_string.decode(values["url"]), _MAX_CHARS),
        _model(body, number),
        start,
        start + len(body),
    )


def _model(body: bytes, number: int) -> str | None:
    raw = _body.decode(body).model
    if isinstance(raw, msgspec.UnsetType) or (value := bytes(raw)) == b"null":
        return None
    if not value.startswith(b'"'):
        raise LineProblem(Problem("invalid_type", "model: must be a string", number, "body.model"))
    return shortened(_string.decode(value), _MAX_CHARS)
