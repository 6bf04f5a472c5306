"""The rules of arguments that are written one by one. A grammar holds their names, their order, and that none is
missing; values that are JSON and the values of an `enum` as the schema has them; other texts are free."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.gateway.tools.bodies import Function

_JSON_TYPES = ("integer", "number", "boolean", "array", "object", "null")
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True)
class Tags:
    """How an argument is written."""

    # Returns what stands before a value; the name is given as it stands in a rule.
    before: Callable[[str], str]
    # The mark that ends a value, and what stands after it.
    closing: str
    after: str


# Returns the rule of this name of free text up to a mark, and what stands for a mark.
UpTo = Callable[[str, str], str]
Mark = Callable[[str], str]


def tagged_rules(name: str, function: Function, tags: Tags, up_to: UpTo, mark: Mark) -> list[str]:
    """Returns the rule `name` of a function's arguments, and those that it needs."""
    text, key = f"{name}_text", f"{name.upper()}_KEY"
    rules = [up_to(text, tags.closing)]
    if not function.strict:
        rules.append(rule(key, "/[^<>\\n]{1,256}/"))
        return [*rules, rule(name, f"({tags.before(key)} {text} {tags.after})*")]
    parts = []
    for place, (each, schema, is_required) in enumerate(_properties(function)):
        value = text
        if texts := _texts(schema):
            value = f"({' | '.join(map(json.dumps, texts))}) {mark(tags.closing)}"
        elif schema.get("type") in _JSON_TYPES:
            rules.append(rule(f"{name}_{place}", json_rule(schema)))
            value = f"{name}_{place} {mark(tags.closing)}"
        part = f"{tags.before(json.dumps(each))} {value} {tags.after}"
        parts.append(part if is_required else f"({part})?")
    return [*rules, rule(name, " ".join(parts) or '""')]


def pythonic_rules(name: str, function: Function) -> list[str]:
    """Returns the rule `name` of a function's arguments as Python has them, with values as JSON has them."""
    if not function.strict:
        value, key = f"{name}_value", f"{name.upper()}_KEY"
        pair = f'{key} "=" {value}'
        rules = [rule(key, "/[a-zA-Z_][a-zA-Z0-9_]*/"), rule(value, json_rule({}))]
        return [*rules, rule(name, f'({pair} (", " {pair})*)?')]
    found = list(_properties(function))
    rules = [rule(f"{name}_first_{len(found)}", '""'), rule(f"{name}_next_{len(found)}", '""')]
    for place, (each, schema, is_required) in enumerate(found):
        rules.append(rule(f"{name}_{place}", json_rule(schema)))
        for kind, comma in (("first", ""), ("next", ", ")):
            later = f"{json.dumps(f'{comma}{each}=')} {name}_{place} {name}_next_{place + 1}"
            left_out = "" if is_required else f" | {name}_{kind}_{place + 1}"
            rules.append(rule(f"{name}_{kind}_{place}", later + left_out))
    return [*rules, rule(name, f"{name}_first_0")]


def rule(name: str, body: str) -> str:
    return f"{name}: {body}"


# Whitespace is as text/grammar.py has it for schemas.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_rule(schema: Mapping[str, Any]) -> str:
    """Returns the body of a rule of JSON."""
    text = json.dumps({**schema, "x-guidance": _JSON_OPTIONS})
    # A grammar with `::=` would be taken for GBNF. In JSON it can only be in a string, where it may be escaped.
    return "%json " + text.replace("::=", ":\\u003a=")


def _properties(function: Function) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yields names, schemas, and whether the argument must be there."""
    whole = function.parameters or {}
    found, required = whole.get("properties"), whole.get("required")
    definitions = {key: whole[key] for key in _DEFINITIONS if key in whole}
    for name, schema in found.items() if isinstance(found, dict) else ():
        known = schema if isinstance(schema, dict) else {}
        yield name, definitions | known, isinstance(required, list) and name in required


def _texts(schema: Mapping[str, Any]) -> Sequence[str]:
    """Returns the texts that the value may be, if it may be nothing else."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return values
    return ()
