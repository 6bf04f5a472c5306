"""What the JSON schema of a function's parameters determines for each argument.

Local references (`#/$defs/NAME`) are followed. A place can be referred to in several spellings, so places are
identified by the schemas at them. Keywords that are not understood here restrict nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from alignedserve.types import InvalidRequest

ALL_KINDS = frozenset(("string", "integer", "number", "boolean", "array", "object", "null"))
# Nesting depth to which references and alternatives are followed.
_MAX_DEPTH = 32
_DEFINITIONS = ("$defs", "definitions")
# Bounds of what is taken from a document, in units: _MAX_TIMES its own size, but at least _MIN_TAKEN. Arguments that
# all refer to one large definition could otherwise take the square of its size.
_MAX_TIMES = 16
_MIN_TAKEN = 128 << 10
# Characters of a text, or bits of a number, that count as one more unit.
_UNIT = 64
# Keywords that restrict no value.
_NOTES = ("$comment", "$schema", "default", "deprecated", "description", "example", "examples", "title")
# Keywords with a schema for each name.
_NAMED = ("properties", "patternProperties", "dependentSchemas")
# Keywords with values that are no schemas.
_DATA = ("const", "enum", "required", "type", "dependentRequired")
# With one of these keywords, arguments may have other names than those of `properties`, or may lack some of them.
_UNHELD = (
    *("allOf", "anyOf", "oneOf", "not", "if", "$ref", "const", "enum", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
    "unevaluatedProperties",
)


@dataclass(frozen=True)
class Argument:
    name: str
    schema: Any
    is_required: bool


@dataclass(frozen=True)
class Arguments:
    # In the order in which they are written.
    known: Sequence[Argument] = ()
    # The schema of arguments with other names. None: there may be none.
    others: Any = None


class Document:
    """A whole schema, to which its local references point."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        # The types that references allow, as far as known, by the id of their target.
        self._kinds: dict[int, frozenset[str]] = {}
        # The keys of schemas, by the ids of these.
        self._keys: dict[int, str] = {}
        # The targets of references, and whether they exist.
        self._targets: dict[str, tuple[Any, bool]] = {}
        # The size of all that was taken so far.
        self._taken = 0

    @cached_property
    def _max_taken(self) -> int:
        return max(_MIN_TAKEN, _MAX_TIMES * _size_of(self._whole))

    def _take(self, size: int) -> None:
        """Counts `size`. Raises InvalidRequest if the sum exceeds the bound."""
        self._taken += size
        if self._taken > self._max_taken:
            raise InvalidRequest("tools: a schema refers to large parts of itself too often")

    @property
    def top(self) -> dict[str, Any]:
        """The schema of the parameters, after following references."""
        found: Any = self._whole
        for _ in range(_MAX_DEPTH):
            if not isinstance(found, dict) or set(found) - {*_NOTES, *_DEFINITIONS, "type"} != {"$ref"}:
                break
            found = self._target(found["$ref"])
        return found if isinstance(found, dict) else {}

    def arguments(self) -> Arguments:
        """Returns the arguments that the schema describes. Raises InvalidRequest."""
        top = self.top
        if any(key in top for key in _UNHELD):
            return Arguments(others=True)
        properties, required = top.get("properties"), top.get("required")
        others = top.get("additionalProperties", not isinstance(properties, dict))
        schemas = dict(properties) if isinstance(properties, dict) else {}
        given = required if isinstance(required, list) else []
        # A dict, because each property is looked up in it.
        names = {name: None for name in given if isinstance(name, str)}
        for name in names:
            if others is False and name not in schemas:
                raise InvalidRequest(f"tools: {name!r} is required, and not among the properties")
            schemas.setdefault(name, others)
        known = [Argument(name, schema, name in names) for name, schema in schemas.items()]
        return Arguments(known, None if others is False else others)

    def kinds(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """Returns the types that a value may have. Types may be too many, but never too few."""
        if schema is False:
            return frozenset()
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return ALL_KINDS
        found = ALL_KINDS
        asked = schema.get("type")
        if isinstance(asked, str | list):
            found &= _with_integers(asked if isinstance(asked, list) else [asked])
        for values in _listed(schema):
            found &= frozenset(map(kind_of, values))
        if isinstance(schema.get("$ref"), str):
            found &= self._kinds_behind(schema["$ref"], depth)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                found &= frozenset().union(*(self.kinds(each, depth + 1) for each in schema[key]))
        for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            found &= self.kinds(each, depth + 1)
        return found

    def _kinds_behind(self, reference: str, depth: int) -> frozenset[str]:
        target = self._target(reference)
        if id(target) not in self._kinds:
            # A circular reference restricts nothing.
            self._kinds[id(target)] = ALL_KINDS
            self._kinds[id(target)] = self.kinds(target, depth + 1)
        return self._kinds[id(target)]

    def alternatives(self, schema: Any) -> list[Any]:
        """Returns schemas without `anyOf`; the schema allows what any of them allows. Raises InvalidRequest."""
        found: list[Any] = []
        left: list[Any] = [schema]
        seen: set[int] = set()
        # `left` grows during the loop.
        for each in left:
            keys = set(each) - set(_NOTES) if isinstance(each, dict) else set()
            key = keys.pop() if len(keys) == 1 else ""
            inner = each[key] if key else None
            if isinstance(inner, list) and (
                key in ("anyOf", "oneOf") or (key == "allOf" and len(inner) == 1)
            ):
                self._take(1)
                left += inner
                continue
            self._take(_size_of(each))
            if key == "$ref" and isinstance(inner, str):
                target = self._target(inner)
                left += [] if id(target) in seen else [target]
                seen.add(id(target))
            else:
                found.append(each)
        # A reference that only leads back to itself restricts nothing.
        return found or [True]

    def key(self, schema: Any) -> str:
        """Returns the same text for schemas of this document that restrict values equally. References count as equal if
        they point to the same place, in whatever spelling; their targets are not compared."""
        if id(schema) not in self._keys:
            self._keys[id(schema)] = json.dumps(_stripped(schema, self._place))
        return self._keys[id(schema)]

    def part(self, schema: Any) -> dict[str, Any]:
        """Returns the schema as a document of its own, with the definitions that it needs and without annotations.
        Raises InvalidRequest."""
        names: dict[int, str] = {}
        targets: list[Any] = []

        def named(reference: str) -> str:
            if not reference.startswith("#"):
                return reference
            target = self._target(reference, is_needed=True)
            if id(target) not in names:
                names[id(target)] = f"d{len(names)}"
                targets.append(target)
            return f"#/$defs/{names[id(target)]}"

        found = _stripped(schema, named)
        # `targets` grows during the loop.
        definitions = {names[id(target)]: _stripped(target, named) for target in targets}
        known = found if isinstance(found, dict) else {} if found is True else {"allOf": [found]}
        whole = known | ({"$defs": definitions} if definitions else {})
        self._take(_size_of(whole))
        return whole

    def _place(self, reference: str) -> str:
        """Returns the same text for references to the same schema, in whatever spelling."""
        target, is_there = self._found(reference)
        return f"#{id(target)}" if is_there else reference

    def _target(self, reference: Any, is_needed: bool = False) -> Any:
        """Returns the target of a local reference. If it does not exist, returns a schema that allows anything, or, if
        it `is_needed`, raises InvalidRequest."""
        target, is_there = self._found(str(reference))
        if is_needed and not is_there:
            raise InvalidRequest(f"tools: $ref={reference!r} points to nothing")
        return target

    def _found(self, reference: str) -> tuple[Any, bool]:
        if reference not in self._targets:
            self._targets[reference] = self._looked_up(reference)
        return self._targets[reference]

    def _looked_up(self, reference: str) -> tuple[Any, bool]:
        found = self._whole
        try:
            head, *keys = unquote(reference).split("/")
            if head != "#":
                return True, False
            for key in keys:
                key = key.replace("~1", "/").replace("~0", "~")
                found = found[int(key)] if isinstance(found, list) else found[key]
        except (LookupError, TypeError, ValueError):
            return True, False
        return found, True


def texts_and_values(schema: Any) -> tuple[list[str], list[Any]] | None:
    """Returns the texts and the other values that the schema enumerates. None: it enumerates none."""
    if not isinstance(schema, dict):
        return None
    lists = _listed(schema)
    if not lists:
        return None
    asked = schema.get("type")
    kinds = _with_integers(asked if isinstance(asked, list) else [asked]) if asked else ALL_KINDS
    found = [
        value for value in lists[0] if kind_of(value) in kinds and all(value in each for each in lists[1:])
    ]
    texts = [value for value in found if isinstance(value, str)]
    return texts, [value for value in found if not isinstance(value, str)]


def _listed(schema: Mapping[str, Any]) -> list[list[Any]]:
    lists = [[schema["const"]]] if "const" in schema else []
    return [*lists, schema["enum"]] if isinstance(schema.get("enum"), list) else lists


def _size_of(value: Any) -> int:
    """Returns the size of a JSON value, in units that take about the same time to visit and to write."""
    size, left = 0, [value]
    while left:
        each = left.pop()
        size += 1
        if isinstance(each, dict):
            left += each.keys()
            left += each.values()
        elif isinstance(each, list):
            left += each
        elif isinstance(each, str):
            size += len(each) // _UNIT
        elif isinstance(each, int):
            size += each.bit_length() // _UNIT
    return size


def kind_of(value: Any) -> str:
    """Returns the type of a value. Empty for a number that JSON lacks."""
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return ("integer" if value.is_integer() else "number") if math.isfinite(value) else ""
        case str():
            return "string"
        case list():
            return "array"
    return "null" if value is None else "object"


def _with_integers(kinds: Sequence[Any]) -> frozenset[str]:
    found = {kind for kind in kinds if isinstance(kind, str)}
    return frozenset(found | {"integer"} if "number" in found else found)


def _stripped(schema: Any, named: Callable[[str], str]) -> Any:
    """Returns the schema without annotations and definitions, and with its references renamed."""
    if isinstance(schema, list):
        return [_stripped(each, named) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NOTES or key in _DEFINITIONS:
            continue
        if key in _DATA:
            found[key] = value
        elif key in _NAMED and isinstance(value, dict):
            found[key] = {name: _stripped(each, named) for name, each in value.items()}
        elif key == "$ref" and isinstance(value, str):
            found[key] = named(value)
        else:
            found[key] = _stripped(value, named)
    return found
