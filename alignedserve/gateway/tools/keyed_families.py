"""Families of models that write arguments one by one, and not as a JSON object."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Sequence

from alignedserve.gateway.tools.bodies import Function
from alignedserve.gateway.tools.family import Family
from alignedserve.gateway.tools.keyed_grammar import (
    GrammarTags,
    JsonRules,
    free_value,
    pythonic_rules,
    rule,
    tagged_rules,
)
from alignedserve.gateway.tools.marked_readers import HERMES_CLOSE, HERMES_OPEN
from alignedserve.gateway.tools.pythonic_reader import BLANKS, LETTERS


class TaggedFamily(Family):
    """Arguments one by one, between tags."""

    @property
    @abstractmethod
    def _tags(self) -> GrammarTags: ...

    def _value_rules(self) -> list[str]:
        return [self._up_to("value", self._tags.closing, "VALUE"), rule("VALUE", free_value(self._tags))]

    def _argument_rules(self, number: int, function: Function, shared: JsonRules) -> Iterable[str]:
        return tagged_rules(f"arguments_{number}", function, self._tags, self._mark, shared)


class QwenCoderFamily(TaggedFamily):
    """`<tool_call><function=NAME><parameter=KEY>…</parameter></function></tool_call>`. Models sometimes omit the first
    tag."""

    marks = (HERMES_OPEN, HERMES_CLOSE)

    @property
    def _tags(self) -> GrammarTags:
        return GrammarTags(
            before=lambda key: f'"<parameter=" {key} ">"',
            closing="</parameter>",
            after='"\\n"?',
            barred=("<parameter=", HERMES_OPEN, HERMES_CLOSE),
            edge="\n",
        )

    def _rules(self, one_at_most: bool, names: Sequence[str]) -> list[str]:
        close = self._mark(HERMES_CLOSE)
        calls = [(HERMES_OPEN, f"BLANKS call BLANKS {close}")]
        calls += [(f"<function={name}>", f"rest_{n} (BLANKS {close})?") for n, name in enumerate(names)]
        return [*self._marked(calls, is_repeated=not one_at_most), *self._value_rules()]

    def _call_rules(self, number: int, function: Function, shared: JsonRules) -> Iterable[str]:
        head = json.dumps(f"<function={function.name}>")
        yield rule(f"call_{number}", f"{head} rest_{number}")
        yield rule(f"rest_{number}", rf'"\n"? arguments_{number} "</function>"')
        yield from self._argument_rules(number, function, shared)


class GlmFamily(TaggedFamily):
    """`<tool_call>NAME<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>`."""

    marks = (HERMES_OPEN, HERMES_CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    @property
    def _tags(self) -> GrammarTags:
        opening, end, value = map(self._mark, self.marks[2:5])
        return GrammarTags(
            before=lambda key: f'{opening} {key} {end} "\\n"? {value}',
            closing=self.marks[5],
            after='"\\n"?',
            barred=(self.marks[2], HERMES_OPEN, HERMES_CLOSE),
        )

    def _rules(self, one_at_most: bool, names: Sequence[str]) -> list[str]:
        calls = [(HERMES_OPEN, f'"\\n"? call {self._mark(HERMES_CLOSE)}')]
        return [*self._marked(calls, is_repeated=not one_at_most), *self._value_rules()]

    def _call_rules(self, number: int, function: Function, shared: JsonRules) -> Iterable[str]:
        yield rule(f"call_{number}", rf'{json.dumps(function.name)} "\n"? arguments_{number}')
        yield from self._argument_rules(number, function, shared)


class PythonicFamily(Family):
    """`[NAME(KEY=VALUE, …)]`."""

    marks = ("<|python_start|>", "<|python_end|>")

    def _rules(self, one_at_most: bool, names: Sequence[str]) -> list[str]:
        start, end = map(self._mark, self.marks)
        more = "" if one_at_most else '(", " call)* '
        calls = f'call {more}"]" ({end})?'
        return [
            rule("start", f'TEXT | {start} "[" {calls} | OPENING (LISTED | {calls})'),
            rule("OPENING", rf"/[{BLANKS}]*\[/"),
            # Text must not begin like a mark or like the list of calls.
            rule("TEXT", rf"/[{BLANKS}]*(<|([^{BLANKS}\[<]|<[^|])(.|\n)*)?/"),
            # A word may follow the bracket, too, unless an opening parenthesis follows it.
            rule(
                "LISTED",
                rf"/[{BLANKS}]*([{LETTERS}]*[{BLANKS}]*|"
                rf"([^{BLANKS}{LETTERS}]|[{LETTERS}]+([{BLANKS}]+[^{BLANKS}(]|[^{BLANKS}({LETTERS}]))(.|\n)*)/",
            ),
        ]

    def _call_rules(self, number: int, function: Function, shared: JsonRules) -> Iterable[str]:
        yield rule(f"call_{number}", f'{json.dumps(f"{function.name}(")} arguments_{number} ")"')
        yield from pythonic_rules(f"arguments_{number}", function, shared)
