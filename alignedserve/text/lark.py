"""Parts of grammars in llguidance's variant of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

# Whitespace is allowed only as json.dumps writes it. Otherwise a small model could generate it forever.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Special tokens in the text around an output, as most models write them.
USUAL_TOKEN = re.compile(r"(<\|\w+\|>)")


def terminals(text: str, token: re.Pattern[str] = USUAL_TOKEN, name: Callable[[str], str] = str) -> str:
    """Returns the text for a rule. What matches `token` is a special token, which a grammar has by its `name`."""
    parts = filter(None, token.split(text))
    return " ".join(name(part) if token.fullmatch(part) else json.dumps(part) for part in parts)


def json_part(schema: Any) -> str:
    if not isinstance(schema, dict):
        schema = {"allOf": [schema]}
    # A grammar that contains `::=` would be taken for GBNF.
    return "%json " + json.dumps(schema | {"x-guidance": JSON_OPTIONS}).replace("::=", ":\\u003a=")


def regex_part(regex: str) -> str:
    # A regex stands between slashes, in one line.
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", regex, flags=re.DOTALL)
    return "/" + escaped.replace("\n", "\\n") + "/"


def grammar_part(grammar: str) -> str:
    return "%lark {\n" + as_lark(grammar) + "\n}"


def as_lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    if "::=" not in grammar:
        return grammar
    try:
        return gbnf_to_lark(grammar)
    except (GbnfToLarkError, RecursionError) as error:
        raise ValueError(str(error)) from error
