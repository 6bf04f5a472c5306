"""Structural tags as a grammar: text that is free up to a tag, and of a required form within it. There are two forms:
`structures` with `triggers`, the older one of vLLM and SGLang, and xgrammar's `format`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from alignedserve.text.lark import grammar_part, json_part, regex_part, terminals

KINDS = (
    *("const_string", "json_schema", "regex", "grammar", "any_text"),
    *("sequence", "or", "tag", "triggered_tags", "tags_with_separator"),
)
Format = Mapping[str, Any]


def lark_of(tag: str, special_ids: Mapping[str, int]) -> str:
    """Returns the grammar of a structural tag in JSON. `special_ids` are the ids of special tokens. Raises
    ValueError."""
    try:
        found = json.loads(tag)
        return _Rules(special_ids).whole(_format_of(found))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _format_of(tag: Any) -> Format:
    match tag:
        case {"format": dict(form)}:
            return form
        case {"structures": [*structures], "triggers": [*triggers]}:
            return {"type": "triggered_tags", "triggers": triggers, "tags": [*map(_older_tag, structures)]}
    raise ValueError("must have a format, or structures and triggers")


def _older_tag(structure: Any) -> Format:
    match structure:
        case {"begin": str(begin), "end": str(end)}:
            content = {"type": "json_schema", "json_schema": structure.get("schema", True)}
            return {"type": "tag", "begin": begin, "content": content, "end": end}
    raise ValueError("a structure must have begin, schema and end")


class _Rules:
    """The rules that a format needs besides its own part of a rule."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        # Matches nothing without special tokens.
        self._token = re.compile(f"({'|'.join(map(re.escape, sorted(special_ids, reverse=True))) or '(?!)'})")
        self._rules: list[str] = []

    def whole(self, form: Format) -> str:
        start = self._part(form, is_last=True)
        return "\n".join([f"start: {start}", *self._rules, r"TEXT: /(.|\n)*/", 'NONE: ""'])

    def _part(self, form: Any, is_last: bool = False) -> str:
        """Returns a format's part of a rule. `is_last`: nothing comes after it."""
        match form:
            case {"excludes": [_, *_]}:
                raise ValueError("excludes: not supported")
            case {"type": "const_string", "value": str(value)}:
                return self._text(value)
            case {"type": "json_schema", "json_schema": schema} if form.get("style", "json") == "json":
                return json_part(schema)
            case {"type": "regex", "pattern": str(pattern)}:
                return regex_part(pattern)
            case {"type": "grammar", "grammar": str(grammar)}:
                return grammar_part(grammar)
            case {"type": "any_text"} if is_last:
                return "TEXT"
            case {"type": "any_text" | "triggered_tags"} if not is_last:
                raise ValueError(
                    f"{form['type']}: only at the end of the format, or any_text as content of a tag"
                )
            case {"type": "sequence", "elements": [*parts, last]}:
                return f"({' '.join([*map(self._part, parts), self._part(last, is_last)])})"
            case {"type": "or", "elements": [_, *_] as parts}:
                return f"({' | '.join(self._part(part, is_last) for part in parts)})"
            case {"type": "tag", "begin": str(begin)}:
                return f"({self._text(begin)} {self._rest(form)})"
            case {"type": "triggered_tags", "triggers": [_, *_] as triggers, "tags": [_, *_] as tags}:
                return self._triggered(form, triggers, tags)
            case {"type": "tags_with_separator", "tags": [_, *_] as tags, "separator": str(separator)}:
                return self._separated(form, tags, separator)
            case {"type": str(kind)} if kind in KINDS:
                raise ValueError(f"a {kind} is not complete, or has a part that is not supported")
        given = form.get("type") if isinstance(form, dict) else form
        raise ValueError(f"format {given!r:.60}: must be one of {', '.join(KINDS)}")

    def _text(self, text: str) -> str:
        return terminals(text, self._token, lambda part: f"<[{self._special_ids[part]}]>") or "NONE"

    def _rest(self, tag: Format) -> str:
        """Returns a tag's part after its beginning."""
        ends = tag.get("end", "")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not ends or not all(isinstance(end, str) for end in ends):
            raise ValueError("the end of a tag must be a text, or a list of texts")
        content = tag.get("content", {"type": "any_text"})
        if isinstance(content, dict) and content.get("type") == "any_text" and not content.get("excludes"):
            return f"({' | '.join(self._up_to(end) for end in ends)})"
        return f"{self._part(content)} ({' | '.join(map(self._text, ends))})"

    def _up_to(self, text: str) -> str:
        """Returns the name of a new rule: free text up to `text`, and `text`."""
        if not text:
            raise ValueError("free text needs a text that ends it")
        # A special token ends free text wherever it occurs; a text does so at its first occurrence.
        lazy = "" if self._token.match(text) else "[lazy]"
        return self._rule(f"TEXT {self._text(text)}", lazy)

    def _rule(self, text: str, lazy: str = "") -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{lazy}: {text}")
        return name

    def _triggered(self, form: Format, triggers: Sequence[Any], tags: Sequence[Any]) -> str:
        """Returns free text with tags. After each trigger, one of its tags must follow."""
        rests: dict[str, list[str]] = {}
        for tag in tags:
            begin = _begin_of(tag)
            found = [
                trigger for trigger in triggers if isinstance(trigger, str) and begin.startswith(trigger)
            ]
            if not found or not found[0]:
                raise ValueError(f"no trigger begins the tag {begin!r:.60}")
            rests.setdefault(found[0], []).append(f"{self._text(begin[len(found[0]) :])} {self._rest(tag)}")
        each = [f"{self._up_to(trigger)} ({' | '.join(after)})" for trigger, after in rests.items()]
        one = self._rule(" | ".join(each))
        if form.get("stop_after_first"):
            return one if form.get("at_least_one") else f"({one} | TEXT)"
        return f"{one}{'+' if form.get('at_least_one') else '*'} TEXT"

    def _separated(self, form: Format, tags: Sequence[Any], separator: str) -> str:
        one = self._rule(" | ".join(f"{self._text(_begin_of(tag))} {self._rest(tag)}" for tag in tags))
        several = one if form.get("stop_after_first") else f"{one} ({self._text(separator)} {one})*"
        return f"({several})" if form.get("at_least_one") else f"({several})?"


def _begin_of(tag: Any) -> str:
    match tag:
        case {"begin": str(begin)}:
            return begin
    raise ValueError("a tag must have a begin")
