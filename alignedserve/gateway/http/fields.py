"""The fields of request bodies. Known fields are checked; unknown ones are removed and named.

Unknown fields are ignored, as other servers do, unless the operator asks for strictness. A body refuses unsupported
fields that would change the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from alignedserve.types import InvalidRequest, shortened

# Unknown and ignored fields that a body may have, together. Real clients send a few.
MAX_UNKNOWN = 64
# The most characters of an unknown name in an error.
MAX_NAME_CHARS = 100
# With these, most fields are as if they were not there. An empty object is not among them: as a schema it is one.
NEUTRAL: tuple[Any, ...] = (False, 0, "", [])


class BodyFields(BaseModel):
    """An object that a client sends. It holds unknown fields until `take_unknown`."""

    model_config = ConfigDict(extra="allow", strict=True)

    # Unsupported fields that would change the answer, each with what to use instead. They are refused.
    refused: ClassVar[Mapping[str, str]] = {}
    # Values with which these change nothing, besides null and NEUTRAL.
    neutral: ClassVar[Mapping[str, Any]] = {}
    # Whether all unknown fields are refused: no other server has this object.
    is_ours: ClassVar[bool] = False


def take_unknown(body: BaseModel) -> list[str]:
    """Removes the unknown fields from `body` and from the objects in it. Returns their full names, such as
    "stream_options.x", each once and in order. Raises InvalidRequest if there are too many, or if one is refused."""
    names: dict[str, None] = {}
    for name in _taken(body, ""):
        names[name] = None
        check_number(names)
    return list(names)


def check_number(names: Collection[str]) -> None:
    """Checks the number of ignored fields. Raises InvalidRequest."""
    if len(names) > MAX_UNKNOWN:
        name = next(islice(names, MAX_UNKNOWN, None))
        raise InvalidRequest(f"{name}: unknown, or ignored, like {MAX_UNKNOWN} parameters before it")


def _taken(found: Any, prefix: str) -> Iterator[str]:
    if isinstance(found, BaseModel):
        extra = found.model_extra
        refused, neutral = (found.refused, found.neutral) if isinstance(found, BodyFields) else ({}, {})
        for name, value in (extra or {}).items():
            if isinstance(found, BodyFields) and found.is_ours:
                known = ", ".join(type(found).model_fields)
                raise InvalidRequest(f"{prefix}{shortened(name, MAX_NAME_CHARS)}: must be one of {known}")
            if name not in refused:
                yield prefix + name
            elif value is not None and value not in NEUTRAL and value != neutral.get(name):
                raise InvalidRequest(f"{prefix}{name}: not supported by this server{refused[name]}")
        if extra:
            extra.clear()
        for name in found.model_fields_set:
            yield from _taken(getattr(found, name, None), f"{prefix}{name}.")
    elif isinstance(found, list) and found and isinstance(found[0], BaseModel):
        for item in found:
            yield from _taken(item, prefix)
