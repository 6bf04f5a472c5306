"""The fields of what clients send: known ones are checked, unknown ones are taken out and named.

A field that is newer than this server, or another server's, is ignored as other servers ignore it, unless the operator
asks for strictness. A field that is known to change what the answer would be is refused by the body that knows it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from alignedserve.types import InvalidRequest, shortened

# The most unknown fields of a body, with others that are ignored. Real clients send a few.
MAX_UNKNOWN = 64
# The most characters of an unknown name in an error.
MAX_NAME_CHARS = 100


class Fields(BaseModel):
    """An object that a client sends. Unknown fields are kept apart until `take_unknown`."""

    model_config = ConfigDict(extra="allow", strict=True)

    # Fields that are unknown here and are not ignored, since the answer would be another; with what to use instead.
    refused: ClassVar[Mapping[str, str]] = {}
    # Whether all unknown fields are refused: no other server has this object.
    is_ours: ClassVar[bool] = False


def take_unknown(body: BaseModel) -> list[str]:
    """Removes the unknown fields from `body` and the objects in it. Returns their names, with those of the objects
    around them, such as "stream_options.x": each once, in order. Raises InvalidRequest if there are too many, or one
    of them is refused."""
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
        refused = found.refused if isinstance(found, Fields) else {}
        for name, value in (extra or {}).items():
            if isinstance(found, Fields) and found.is_ours:
                known = ", ".join(type(found).model_fields)
                raise InvalidRequest(f"{prefix}{shortened(name, MAX_NAME_CHARS)}: must be one of {known}")
            if name not in refused:
                yield prefix + name
            elif value:
                raise InvalidRequest(f"{prefix}{name}: not supported by this server{refused[name]}")
        if extra:
            extra.clear()
        for name in found.model_fields_set:
            yield from _taken(getattr(found, name, None), f"{prefix}{name}.")
    elif isinstance(found, list) and found and isinstance(found[0], BaseModel):
        for item in found:
            yield from _taken(item, prefix)
