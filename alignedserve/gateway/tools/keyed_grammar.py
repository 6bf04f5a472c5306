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
from alignedserve.gateway.tools.schemas import (
    ALL_KINDS,
    NOTES,
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


class JsonRules:
    """The rules of values of one grammar: there is one for all arguments that have the same schema."""

    def __init__(self) -> None:
        # Their numbers by their bodies.
        self._numbers: dict[str, int] = {}

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
    values = _Values(function)
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
    values = _Values(function)
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


# The texts that a value may be, and the bodies of rules of JSON; None in place of those if any text is allowed.
Alternatives = tuple[Sequence[str], Sequence[str] | None]


class _Values:
    """The arguments of one function, and the rules of their values. What is found out about a schema is kept: many
    arguments may refer to one that is large."""

    def __init__(self, function: Function) -> None:
        self._document = Document(function.parameters or {})
        self.arguments = self._document.arguments() if function.strict else Arguments(others=True)
        # By schema (`_key`), and by type of the value besides.
        self._json: dict[object, str] = {}
        self._alternatives: dict[object, Alternatives] = {}
        # The texts and the bodies of a schema without alternatives.
        self._single: dict[int, Alternatives] = {}
        # The types as which texts are read; None: as texts.
        self._kind_read: dict[str, str | None] = {}

    def json(self, schema: Any) -> str:
        key = _key(schema)
        if key not in self._json:
            self._json[key] = json_rule(self._document.part(schema))
        return self._json[key]

    def alternatives(self, schema: Any, kinds: frozenset[str] | None = None) -> Alternatives:
        """`kinds` are the types by which a value is read, if not by the schema."""
        key = _key(schema), kinds
        if key not in self._alternatives:
            self._alternatives[key] = self._found_alternatives(schema, kinds)
        return self._alternatives[key]

    def _found_alternatives(self, schema: Any, kinds: frozenset[str] | None) -> Alternatives:
        # Each stands once, in the order in which they are found.
        texts: dict[str, None] = {}
        parts: dict[str, None] = {}
        for each in self._document.alternatives(schema):
            if id(each) not in self._single:
                self._single[id(each)] = self._found_single(each)
            found, bodies = self._single[id(each)]
            if bodies is None:
                return [], None
            texts |= dict.fromkeys(found)
            parts |= dict.fromkeys(bodies)
        kinds = self._document.kinds(schema) if kinds is None else kinds
        read_back = [text for text in texts if not self._is_other_value(text, kinds)]
        return read_back, [*parts] if read_back or parts else [self.json(schema)]

    def _found_single(self, schema: Any) -> Alternatives:
        listed = texts_and_values(schema)
        if listed:
            return listed[0], [json_rule({"enum": listed[1]})] if listed[1] else []
        if "string" in self._document.kinds(schema):
            return [], None
        return [], [] if schema is False else [self.json(schema)]

    def _is_other_value(self, text: str, kinds: frozenset[str]) -> bool:
        """Whether the text, of a value that may be of these types, would be read as something else."""
        if text not in self._kind_read:
            self._kind_read[text] = _kind_read(text)
        kind = self._kind_read[text]
        # Where anything is allowed, JSON is read as such.
        return kind is not None and (kinds == ALL_KINDS or kind in kinds - {"string"})

    def other_names(self, allowed: str) -> str:
        """Returns the body of a terminal of the names that arguments may have beside the known ones."""
        names = " | ".join(literal(each.name) for each in self.arguments.known)
        return f"/{allowed}/" + (f" & ~({names})" if names else "")


def _key(schema: Any) -> object:
    """Returns what two schemas of one document have in common only if they allow the same."""
    if isinstance(schema, dict) and set(schema) - set(NOTES) == {"$ref"} and isinstance(schema["$ref"], str):
        return schema["$ref"]
    return id(schema)


def _kind_read(text: str) -> str | None:
    """Returns the type of the JSON value that the text is; None if it is none."""
    try:
        return kind_of(json.loads(text))
    except (ValueError, RecursionError):
        return None


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
