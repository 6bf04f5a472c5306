"""Grammar rules of arguments that are written one by one. The grammar constrains their names and order, and requires
all that the schema requires.

A value that can't be a string follows its schema, as does one of an enumeration. Other strings are free.
"""

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
class GrammarTags:
    """How an argument is written."""

    # Returns the text before a value, as rule. The name is given as it stands in a rule.
    before: Callable[[str], str]
    # The mark that ends a value, and what follows it.
    closing: str
    after: str
    # Marks that end a value too, and that a free text may not have.
    barred: Sequence[str]
    # Text around a value that is JSON or of an enumeration, and not part of it.
    edge: str = ""


# Returns a mark as it stands in a rule.
Mark = Callable[[str], str]

# Names that the readers can parse: between tags, and in the pythonic format.
_TAGGED_NAME = r"[^<>\s]([^<>\n]{0,254}[^<>\s])?"
_PYTHONIC_NAME = r"[a-zA-Z_][a-zA-Z0-9_.-]{0,255}"
_READABLE_IN_PYTHONIC = re.compile(r"""[^\s=()\[\]{},"']{1,256}""")


# Bytes of schemas that are examined for a grammar, per byte that the grammar may have. Different spellings of one
# schema are only found to be equal when they are written, and each takes time.
_LOOKED_AT_PER_BYTE = 64


class JsonRules:
    """The JSON rules of a grammar: one for all arguments with the same schema."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` is the largest size of the grammar."""
        # Numbers of rules by their bodies.
        self._numbers: dict[str, int] = {}
        self._room = _LOOKED_AT_PER_BYTE * max_bytes

    def written(self, schema: Mapping[str, Any]) -> str:
        """Returns the body of a rule. Raises InvalidRequest if all schemas together are too large."""
        body = json_rule(schema)
        self.look_at(body)
        return body

    def look_at(self, text: str) -> None:
        """Counts the text. Raises InvalidRequest if all schemas together are too large."""
        self._room -= len(text)
        if self._room < 0:
            raise InvalidRequest("tools: their schemas, with all that they refer to, are too large")

    def new(self, bodies: Iterable[str]) -> Iterator[str]:
        """Yields the rules with these bodies that the grammar lacks."""
        for body in bodies:
            if body not in self._numbers:
                self._numbers[body] = len(self._numbers)
                yield rule(self.name_of(body), body)

    def name_of(self, body: str) -> str:
        return f"json_{self._numbers[body]}"


def free_value(tags: GrammarTags) -> str:
    """Returns the body of the terminal of free values."""
    barred = "|".join(re.escape(mark).replace("/", r"\/") for mark in tags.barred)
    return rf"/(.|\n)*/ & ~/(.|\n)*({barred})(.|\n)*/"


def tagged_rules(
    name: str, function: Function, tags: GrammarTags, mark: Mark, shared: JsonRules
) -> Iterator[str]:
    """Yields the rule `name` of a function's arguments, and the rules that it needs. The rule `value` is a free text,
    up to the mark that ends it. Raises InvalidRequest."""
    values = _Values(function, shared)
    key, found = f"{name.upper()}_KEY", []
    # References to the values of an argument, by the id of its alternatives.
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
        # The reader does not know their types.
        texts, parts = values.alternatives(others, ALL_KINDS)
        value = yield from _tagged(texts, parts, tags, mark, shared)
        yield rule(key, values.other_names(_TAGGED_NAME))
        found.append(f"({tags.before(key)} {value} {tags.after})*")
    yield rule(name, " ".join(found) or '""')


def _tagged(
    texts: Sequence[str], parts: Sequence[str] | None, tags: GrammarTags, mark: Mark, shared: JsonRules
) -> Generator[str, None, str]:
    """Yields the rules of a value that the grammar lacks. Returns the rule's text for the value and the mark that ends
    it."""
    if parts is None:
        return "value"
    for text in texts:
        if any(mark in text for mark in (tags.closing, *tags.barred)):
            raise InvalidRequest(f"tools: {text!r}: this model can't write a value with its own marks")
    yield from shared.new(parts)
    bodies = [*map(literal, texts), *(shared.name_of(part) for part in parts)]
    value = bodies[0]
    if len(bodies) > 1:
        # Each argument with these alternatives refers to one rule.
        either = " | ".join(bodies)
        yield from shared.new([either])
        value = shared.name_of(either)
    edge = f"{literal(tags.edge)} " if tags.edge else ""
    return f"{edge}{value} {edge}{mark(tags.closing)}"


def pythonic_rules(name: str, function: Function, shared: JsonRules) -> Iterator[str]:
    """Yields the rule `name` of a function's arguments in pythonic format, with values in JSON."""
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
        # Results by the schemas' keys: many arguments may have equal schemas.
        self._bodies: dict[str, str] = {}
        self._alternatives: dict[tuple[str, frozenset[str] | None], _Alternatives] = {}

    def json(self, schema: Any) -> str:
        key = self._document.key(schema)
        if key not in self._bodies:
            self._bodies[key] = self._shared.written(self._document.part(schema))
        return self._bodies[key]

    def alternatives(self, schema: Any, kinds: frozenset[str] | None = None) -> _Alternatives:
        """Returns the texts that a value may be, and the bodies of JSON rules. None in place of those: any text is
        allowed. `kinds` are the types by which the value is read, if not by its schema."""
        key = self._document.key(schema), kinds
        if key not in self._alternatives:
            self._alternatives[key] = self._found(schema, kinds)
        return self._alternatives[key]

    def _found(self, schema: Any, kinds: frozenset[str] | None) -> _Alternatives:
        # Each once, in order.
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
        """Returns the body of the terminal of further argument names."""
        names = " | ".join(literal(each.name) for each in self.arguments.known)
        return f"/{allowed}/" + (f" & ~({names})" if names else "")


def _is_other_value(text: str, kinds: frozenset[str]) -> bool:
    """Whether the text of a value with these types would be read as something else."""
    try:
        found = json_of(text, is_kept=True)
    except (ValueError, RecursionError):
        return False
    # If anything is allowed, JSON is read as JSON.
    return kinds == ALL_KINDS or kind_of(found) in kinds - {"string"}


def rule(name: str, body: str) -> str:
    return f"{name}: {body}"


# A grammar with `::=` would be taken for GBNF. In a string, an escape avoids that.
_ESCAPED = ("::=", ":\\u003a=")


def literal(text: str) -> str:
    """Returns the text as it stands in a rule. Raises InvalidRequest."""
    if not is_text(text):
        raise InvalidRequest(f"tools: {text!r}: a text contains half of a surrogate pair")
    return json.dumps(text).replace(*_ESCAPED)


# Whitespace as text/grammar.py has it for schemas.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_rule(schema: Mapping[str, Any]) -> str:
    """Returns the body of a JSON rule."""
    return "%json " + json.dumps({**schema, "x-guidance": _JSON_OPTIONS}).replace(*_ESCAPED)
