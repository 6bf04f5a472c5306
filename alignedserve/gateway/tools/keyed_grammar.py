"""The rules of arguments that are written one by one. A grammar holds their names, their order, and that none is
missing. A value that may be no text follows its schema, and so does one of texts that are listed; other texts are
free."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.gateway.tools.bodies import Function
from alignedserve.gateway.tools.calls import json_of
from alignedserve.gateway.tools.schemas import (
    ALL_KINDS,
    Arguments,
    Document,
    kind_of,
    texts_and_values,
)
from alignedserve.types import InvalidRequest, is_text


@dataclass(frozen=True)
class Tags:
    """How an argument is written."""

    # Returns what stands before a value; the name is given as it stands in a rule.
    before: Callable[[str], str]
    # The mark that ends a value, and what stands after it.
    closing: str
    after: str
    # Marks that end a value too, which a free text may not have.
    barred: Sequence[str]
    # What stands around a value in JSON, or one that is listed, and is no part of it.
    edge: str = ""


# Returns what stands for a mark.
Mark = Callable[[str], str]

# Names that readers can find between tags, and within Python.
_TAGGED_NAME = r"[^<>\s]([^<>\n]{0,254}[^<>\s])?"
_PYTHONIC_NAME = r"[a-zA-Z_][a-zA-Z0-9_.-]{0,255}"
_READABLE_IN_PYTHONIC = re.compile(r"""[^\s=()\[\]{},"']{1,256}""")


# The most bytes of schemas that are gone through for a grammar, per byte that it may have. Schemas may be spelt in many
# ways that are found to be equal only when they are written, and each of them takes its time.
_LOOKED_AT_PER_BYTE = 64


class JsonRules:
    """The rules of JSON of one grammar: there is one for all arguments that have the same schema."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` is what the grammar may have."""
        # Their numbers by their bodies.
        self._numbers: dict[str, int] = {}
        self._room = _LOOKED_AT_PER_BYTE * max_bytes

    def written(self, schema: Mapping[str, Any]) -> str:
        """Returns the body of a rule. Raises InvalidRequest when it is one too many."""
        body = json_rule(schema)
        self.look_at(body)
        return body

    def look_at(self, text: str) -> None:
        """Counts the text. Raises InvalidRequest when it is one too many."""
        self._room -= len(text)
        if self._room < 0:
            raise InvalidRequest("tools: their schemas are too large, with what they refer to")

    def new(self, bodies: Iterable[str]) -> Iterator[str]:
        """Yields the rules with these bodies that the grammar does not have yet."""
        for body in bodies:
            if body not in self._numbers:
                self._numbers[body] = len(self._numbers)
                yield rule(self.name_of(body), body)

    def name_of(self, body: str) -> str:
        return f"json_{self._numbers[body]}"


def free_value(tags: Tags) -> str:
    """Returns the body of a terminal of texts that a value may be where no schema holds it."""
    barred = "|".join(re.escape(mark).replace("/", r"\/") for mark in tags.barred)
    return rf"/(.|\n)*/ & ~/(.|\n)*({barred})(.|\n)*/"


def tagged_rules(name: str, function: Function, tags: Tags, mark: Mark, shared: JsonRules) -> Iterator[str]:
    """Yields the rule `name` of a function's arguments, and those that it needs. `value` is that of a free text, up to
    the mark that ends it. Raises InvalidRequest."""
    values = _Values(function, shared)
    key, found = f"{name.upper()}_KEY", []
    # What stands for the values of an argument, by the alternatives that it has.
    written: dict[int, str] = {}
    for each in values.arguments.known:
        if not re.fullmatch(_TAGGED_NAME, each.name):
            raise _unwritable(each.name)
        alternatives = values.alternatives(each.schema)
        if id(alternatives) not in written:
            written[id(alternatives)] = yield from _tagged(*alternatives, tags, mark, shared)
        part = f"{tags.before(literal(each.name))} {written[id(alternatives)]} {tags.after}"
        found.append(part if each.is_required else f"({part})?")
    others = values.arguments.others
    if others is not None:
        # The reader doesn't know their types.
        texts, parts = values.alternatives(others, ALL_KINDS)
        value = yield from _tagged(texts, parts, tags, mark, shared)
        yield rule(key, values.other_names(_TAGGED_NAME))
        found.append(f"({tags.before(key)} {value} {tags.after})*")
    yield rule(name, " ".join(found) or '""')


def _tagged(
    texts: Sequence[str], parts: Sequence[str] | None, tags: Tags, mark: Mark, shared: JsonRules
) -> Generator[str, None, str]:
    """Yields the rules of a value that the grammar does not have yet, and returns what stands for it, and for the mark
    that ends it."""
    if parts is None:
        return "value"
    for text in texts:
        if any(mark in text for mark in (tags.closing, *tags.barred)):
            raise InvalidRequest(f"tools: {text!r}: this model can't write a value with its own marks")
    yield from shared.new(parts)
    bodies = [*map(literal, texts), *(shared.name_of(part) for part in parts)]
    value = bodies[0]
    if len(bodies) > 1:
        # Each argument that has these alternatives refers to one rule of them.
        either = " | ".join(bodies)
        yield from shared.new([either])
        value = shared.name_of(either)
    edge = f"{literal(tags.edge)} " if tags.edge else ""
    return f"{edge}{value} {edge}{mark(tags.closing)}"


def pythonic_rules(name: str, function: Function, shared: JsonRules) -> Iterator[str]:
    """Yields the rule `name` of a function's arguments as Python has them, with values as JSON has them."""
    values = _Values(function, shared)
    known, others = values.arguments.known, values.arguments.others
    more = ""
    if others is not None:
        body, key = values.json(others), f"{name.upper()}_KEY"
        yield from shared.new([body])
        yield rule(key, values.other_names(_PYTHONIC_NAME))
        more = f'{key} "=" {shared.name_of(body)}'
    for kind, comma in (("first", '""'), ("next", '", "')):
        yield rule(f"{name}_{kind}_{len(known)}", f'({comma} {more} (", " {more})*)?' if more else '""')
    for place, each in enumerate(known):
        if not _READABLE_IN_PYTHONIC.fullmatch(each.name):
            raise _unwritable(each.name)
        body = values.json(each.schema)
        yield from shared.new([body])
        for kind, comma in (("first", ""), ("next", ", ")):
            later = f"{literal(f'{comma}{each.name}=')} {shared.name_of(body)} {name}_next_{place + 1}"
            left_out = "" if each.is_required else f" | {name}_{kind}_{place + 1}"
            yield rule(f"{name}_{kind}_{place}", later + left_out)
    yield rule(name, f"{name}_first_0")


def _unwritable(name: str) -> InvalidRequest:
    return InvalidRequest(f"tools: {name!r}: this model can't write an argument of this name")


_Alternatives = tuple[Sequence[str], Sequence[str] | None]


class _Values:
    """The arguments of one function, and the rules of their values."""

    def __init__(self, function: Function, shared: JsonRules) -> None:
        self._document = Document(function.parameters or {})
        self._shared = shared
        self.arguments = self._document.arguments() if function.strict else Arguments(others=True)
        # What was found, by the schemas' keys: many arguments may have equal ones.
        self._bodies: dict[str, str] = {}
        self._alternatives: dict[tuple[str, frozenset[str] | None], _Alternatives] = {}

    def json(self, schema: Any) -> str:
        key = self._document.key(schema)
        if key not in self._bodies:
            self._bodies[key] = self._shared.written(self._document.part(schema))
        return self._bodies[key]

    def alternatives(self, schema: Any, kinds: frozenset[str] | None = None) -> _Alternatives:
        """Returns the texts that a value may be, and the bodies of rules of JSON; None in place of those if any text
        is allowed. `kinds` are the types by which it is read, if not by the schema."""
        key = self._document.key(schema), kinds
        if key not in self._alternatives:
            self._alternatives[key] = self._found(schema, kinds)
        return self._alternatives[key]

    def _found(self, schema: Any, kinds: frozenset[str] | None) -> _Alternatives:
        # Each stands once, in the order in which they are found.
        texts: dict[str, None] = {}
        parts: dict[str, None] = {}
        kinds = self._document.kinds(schema) if kinds is None else kinds
        for each in self._document.alternatives(schema):
            self._shared.look_at(self._document.key(each))
            listed = texts_and_values(each)
            if listed:
                texts |= dict.fromkeys(listed[0])
                parts |= {self._shared.written({"enum": listed[1]}): None} if listed[1] else {}
            elif "string" in self._document.kinds(each):
                return [], None
            elif each is not False:
                parts[self.json(each)] = None
        read_back = [text for text in texts if not _is_other_value(text, kinds)]
        return read_back, [*parts] if read_back or parts else [self.json(schema)]

    def other_names(self, allowed: str) -> str:
        """Returns the body of a terminal of the names that arguments may have beside the known ones."""
        names = " | ".join(literal(each.name) for each in self.arguments.known)
        return f"/{allowed}/" + (f" & ~({names})" if names else "")


def _is_other_value(text: str, kinds: frozenset[str]) -> bool:
    """Whether the text, of a value that may be of these types, would be read as something else."""
    try:
        found = json_of(text, is_kept=True)
    except (ValueError, RecursionError):
        return False
    # Where anything is allowed, JSON is read as such.
    return kinds == ALL_KINDS or kind_of(found) in kinds - {"string"}


def rule(name: str, body: str) -> str:
    return f"{name}: {body}"


# A grammar with `::=` would be taken for GBNF. In a string it may be escaped.
_ESCAPED = ("::=", ":\\u003a=")


def literal(text: str) -> str:
    """Returns what stands for the text in a rule. Raises InvalidRequest."""
    if not is_text(text):
        raise InvalidRequest(f"tools: {text!r}: no text may have half of a surrogate pair")
    return json.dumps(text).replace(*_ESCAPED)


# Whitespace is as text/grammar.py has it for schemas.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_rule(schema: Mapping[str, Any]) -> str:
    """Returns the body of a rule of JSON."""
    return "%json " + json.dumps({**schema, "x-guidance": _JSON_OPTIONS}).replace(*_ESCAPED)
