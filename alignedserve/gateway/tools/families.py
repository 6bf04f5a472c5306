"""How a model writes calls that it may make or not, by what its chat template shows of them.

A grammar holds the calls of functions that are `strict`, and holds where there may be one call only: text is free, and
once a call begins, it is of one of the tools, with arguments as its schema has them (any, for a tool that is not
strict). Arguments that are written one by one, not as a JSON object, are held in keyed_grammar.py.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, ClassVar

from alignedserve.gateway.tools import harmony
from alignedserve.gateway.tools.bodies import Function, Tool
from alignedserve.gateway.tools.keyed_grammar import (
    Tags,
    free_value,
    json_rule,
    pythonic_rules,
    rule,
    tagged_rules,
)
from alignedserve.gateway.tools.readers import HERMES_CLOSE, HERMES_OPEN
from alignedserve.gateway.tools.schemas import Document
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.types import InvalidRequest

# Returns the id of a text that is a token which an answer's text leaves out; None if it is no such token.
SpecialId = Callable[[str], int | None]


class Family(ABC):
    # The name by which a prepared call asks for the reader (reading.py).
    name: ClassVar[str]
    # The marks of calls, which a vocabulary may have as special tokens.
    marks: ClassVar[Sequence[str]] = ()
    # The name of the reader where a grammar holds the text, if that is another one.
    held_name: ClassVar[str] = ""

    def __init__(self, special_id: SpecialId) -> None:
        self._special_id = special_id

    @property
    def has_special_marks(self) -> bool:
        return any(self._special_id(mark) is not None for mark in self.marks)

    def structure(
        self, tools: Sequence[Tool], one_at_most: bool, max_bytes: int
    ) -> StructuredOutputsParams | None:
        """Returns the grammar of the text, or None if it needs or has none. Raises InvalidRequest."""
        if not one_at_most and not any(tool.function.strict for tool in tools):
            return None
        names = [tool.function.name for tool in tools]
        return self._grammar(self._rules(one_at_most, names), [tool.function for tool in tools], max_bytes)

    def _grammar(
        self, rules: Iterable[str], functions: Sequence[Function], max_bytes: int
    ) -> StructuredOutputsParams:
        calls = rule("call", " | ".join(f"call_{n}" for n in range(len(functions))))
        each = (self._call_rules(number, function) for number, function in enumerate(functions))
        found, num_bytes = [], 0
        try:
            for text in chain(rules, [calls], chain.from_iterable(each)):
                found.append(text)
                num_bytes += len(text) + 1
                if num_bytes > max_bytes:
                    raise InvalidRequest(f"tools: their grammar has more than {max_bytes} bytes")
        except RecursionError:
            raise InvalidRequest("tools: a schema is nested too deeply") from None
        return StructuredOutputsParams(grammar="\n".join(found))

    @abstractmethod
    def _rules(self, one_at_most: bool, names: Sequence[str]) -> list[str]:
        """Returns the rules of the grammar around `call`. `names` are those of the functions."""

    def _call_rules(self, number: int, function: Function) -> Iterable[str]:
        """Returns the rules of the calls of one function, which is that of this number."""
        before, after = self._around(function.name)
        asked: dict[str, Any] = {"type": "object"}
        if function.strict and function.parameters:
            asked |= Document(function.parameters).part(function.parameters)
        return [
            rule(f"call_{number}", f"{before} arguments_{number} {after}".rstrip()),
            rule(f"arguments_{number}", json_rule(asked)),
        ]

    def _around(self, name: str) -> tuple[str, str]:
        """Returns what stands for a call's text before and after its arguments."""
        return json.dumps(f'{{"name": "{name}", "arguments": '), '"}"'

    def _mark(self, mark: str) -> str:
        """Returns what stands for the mark in a rule."""
        token_id = self._special_id(mark)
        return json.dumps(mark) if token_id is None else f"<[{token_id}]>"

    def _marked(self, calls: Sequence[tuple[str, str]], is_repeated: bool) -> list[str]:
        """Returns the rules of free text in which each of `calls` may begin, with a mark and what comes after it."""
        begun = " | ".join(f"opening_{n} {after}" for n, (_, after) in enumerate(calls))
        return [
            rule("start", f"({begun})* text" if is_repeated else f"{begun} | text"),
            *(self._up_to(f"opening_{n}", mark) for n, (mark, _) in enumerate(calls)),
            rule("text", "TEXT"),
            rule("TEXT", r"/(.|\n)*/"),
            _BLANKS,
        ]

    def _up_to(self, name: str, mark: str, free: str = "TEXT") -> str:
        """Returns the rule of this name: free text up to the mark, and the mark. A mark between slashes is an
        expression."""
        if mark.startswith("/"):
            return rule(f"{name}[lazy]", f"{free} {mark}")
        # A token ends free text wherever it comes; a text does so where it comes first.
        lazy = "" if self._special_id(mark) is not None else "[lazy]"
        return rule(f"{name}{lazy}", f"{free} {self._mark(mark)}")


# What models write between marks and calls, or leave out. It has an end: a small model could go on with it for ever.
_BLANKS = rule("BLANKS", r"/[ \n]{0,8}/")


class HermesFamily(Family):
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, with text around it."""

    name = "hermes"
    marks = (HERMES_OPEN, HERMES_CLOSE)

    def _rules(self, one_at_most: bool, names: Sequence[str]) -> list[str]:
        return self._marked(
            [(HERMES_OPEN, f"BLANKS call BLANKS {self._mark(HERMES_CLOSE)}")], is_repeated=not one_at_most
        )


class LlamaFamily(Family):
    """A JSON object, bare. A grammar holds no call after a text, so that such a call is none where there is one."""

    name = "json-in-text"
    held_name = "json"

    def _rules(self, one_at_most: bool, names: Sequence[str]) -> list[str]:
        more = "" if one_at_most else '("," BLANKS call)*'
        return [
            rule("start", f'TEXT | call | "[" (LISTED | BLANKS call {more} BLANKS "]")'),
            rule("TEXT", r"/(\s*[^\s{\[](.|\n)*)?/"),
            # A text that begins with a bracket. What stands between calls may come before the first one too.
            rule("LISTED", r"/[\s\[\],;]*([^\s\[\],;{](.|\n)*)?/"),
            _BLANKS,
        ]

    def _around(self, name: str) -> tuple[str, str]:
        return json.dumps(f'{{"name": "{name}", "parameters": '), '"}"'


class SectionFamily(Family):
    """A mark that begins the section of calls, and one that begins each call. Models leave the first one out at times.

    `marks` are: the section's, the call's, that before the arguments, and those that end the call and the section."""

    def _rules(self, one_at_most: bool, names: Sequence[str]) -> list[str]:
        section, call, _, end, last = self.marks
        one = f"{self._before_call()} call {self._mark(end)}".lstrip()
        more = "" if one_at_most else f'("\\n"? {self._mark(call)} {one})* '
        rest = f'{one} {more}"\\n"? '
        return self._marked(
            [
                (section, f'"\\n"? {self._mark(call)} {rest}{self._mark(last)}'),
                (call, f"{rest}({self._mark(last)})?"),
            ],
            is_repeated=False,
        )

    def _before_call(self) -> str:
        return ""


class DeepSeekFamily(SectionFamily):
    """`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>…`: the name, and JSON. V3.1 writes less around it than V3 and R1
    do."""

    name = "deepseek"
    marks = (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    )
    is_fenced = True

    def _before_call(self) -> str:
        return f'"function" {self._mark(self.marks[2])}' if self.is_fenced else ""

    def _around(self, name: str) -> tuple[str, str]:
        if self.is_fenced:
            return json.dumps(f"{name}\n```json\n"), json.dumps("\n```")
        return f"{json.dumps(name)} {self._mark(self.marks[2])}", ""


class DeepSeekV31Family(DeepSeekFamily):
    name = "deepseek"
    is_fenced = False


class KimiFamily(SectionFamily):
    """`<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}…`."""

    name = "kimi"
    marks = (
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    )

    def _around(self, name: str) -> tuple[str, str]:
        return f"{json.dumps(f'functions.{name}:')} /[0-9]{{1,4}}/ {self._mark(self.marks[2])}", ""


class ListFamily(Family):
    """A mark, and then a list of calls in JSON, or a single one; a mark may close it."""

    # Each of them may begin calls. One that is no token begins them only with a bracket behind it: a text may well
    # have a word that is a mark.
    openings: ClassVar[Sequence[str]]
    closings: ClassVar[Sequence[str]] = ()

    def _rules(self, one_at_most: bool, names: Sequence[str]) -> list[str]:
        more = "" if one_at_most else '("," BLANKS "{" call)* '
        closing = f"(BLANKS ({' | '.join(map(self._mark, self.closings))}))?" if self.closings else ""
        listed, single = f'BLANKS "{{" call {more}BLANKS "]" {closing}', f"call {closing}"
        calls = []
        for mark in self.openings:
            if self._special_id(mark) is not None:
                calls.append((mark, f'BLANKS ("[" {listed} | "{{" {single})'))
            else:
                calls += [(rf"/{re.escape(mark)}\s*\[/", listed), (rf"/{re.escape(mark)}\s*\{{/", single)]
        return self._marked(calls, is_repeated=False)

    def _around(self, name: str) -> tuple[str, str]:
        return json.dumps(f'"name": "{name}", "arguments": '), '"}"'


class MistralFamily(ListFamily):
    """`[TOOL_CALLS]`, and then the list."""

    name = "mistral-list"
    marks = openings = ("[TOOL_CALLS]",)


class GraniteFamily(ListFamily):
    """`<|tool_call|>`, and then the list."""

    name = "granite"
    marks = ("<|tool_call|>", "<|/tool_call|>")
    openings = ("<|tool_call|>", HERMES_OPEN)
    closings = ("<|/tool_call|>", HERMES_CLOSE)


class PhiFamily(ListFamily):
    """The same, or `functools` in place of the mark."""

    name = "phi"
    marks = ("<|tool_call|>", "<|/tool_call|>")
    openings = ("<|tool_call|>", "functools")
    closings = ("<|/tool_call|>",)


class HunyuanFamily(ListFamily):
    """`<tool_calls>[…]</tool_calls>`: Hunyuan's and Jamba's."""

    name = "hunyuan"
    marks = ("<tool_calls>", "</tool_calls>")
    openings = ("<tool_calls>",)
    closings = ("</tool_calls>",)


class NewerMistralFamily(Family):
    """`[TOOL_CALLS]NAME[ARGS]{…}`, with `[CALL_ID]ID` before `[ARGS]` in some versions."""

    name = "mistral"
    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def _rules(self, one_at_most: bool, names: Sequence[str]) -> list[str]:
        return self._marked([(self.marks[0], "call")], is_repeated=not one_at_most)

    def _around(self, name: str) -> tuple[str, str]:
        arguments, call_id = map(self._mark, self.marks[1:])
        return f"{json.dumps(name)} ({call_id} /[a-zA-Z0-9_-]{{1,64}}/)? {arguments} BLANKS", ""


class HarmonyFamily(Family):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`: gpt-oss. Messages of its
    channels may come before."""

    name = "harmony"
    marks = harmony.MARKS

    def forced(self, tools: Sequence[Tool], max_bytes: int) -> StructuredOutputsParams:
        """Returns the grammar of a call of one of the tools, by their schemas. Raises InvalidRequest."""
        functions = [tool.function.model_copy(update={"strict": True}) for tool in tools]
        return self._grammar([rule("start", f"{self._mark(harmony.CHANNEL)} call")], functions, max_bytes)

    def _rules(self, one_at_most: bool, names: Sequence[str]) -> list[str]:
        """A call ends the output: the prompt of its result comes next."""
        channel, message, start = map(self._mark, (harmony.CHANNEL, harmony.MESSAGE, harmony.START))
        return [
            rule("start", f'({channel} KIND {message} ended {start} "assistant")* {channel} last'),
            rule("last", f"KIND {message} TEXT | call"),
            self._up_to("ended", harmony.ENDS[0]),
            rule("KIND", '"analysis" | "commentary" | "final"'),
            rule("TEXT", r"/(.|\n)*/"),
        ]

    def _around(self, name: str) -> tuple[str, str]:
        constrain, message = map(self._mark, (harmony.CONSTRAIN, harmony.MESSAGE))
        head = json.dumps(f"commentary to=functions.{name}")
        return f'{head} (" " | " "? {constrain} "json" | " json")? {message}', ""


class TaggedFamily(Family):
    """Arguments one by one, between tags."""

    @property
    @abstractmethod
    def _tags(self) -> Tags: ...

    def _value_rules(self) -> list[str]:
        return [self._up_to("value", self._tags.closing, "VALUE"), rule("VALUE", free_value(self._tags))]

    def _argument_rules(self, number: int, function: Function) -> Iterable[str]:
        return tagged_rules(f"arguments_{number}", function, self._tags, self._mark)


class QwenCoderFamily(TaggedFamily):
    """`<tool_call><function=NAME><parameter=KEY>…</parameter></function></tool_call>`. Models leave the first tag out
    at times."""

    name = "qwen-coder"
    marks = (HERMES_OPEN, HERMES_CLOSE)

    @property
    def _tags(self) -> Tags:
        return Tags(
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

    def _call_rules(self, number: int, function: Function) -> Iterable[str]:
        head = json.dumps(f"<function={function.name}>")
        yield rule(f"call_{number}", f"{head} rest_{number}")
        yield rule(f"rest_{number}", rf'"\n"? arguments_{number} "</function>"')
        yield from self._argument_rules(number, function)


class GlmFamily(TaggedFamily):
    """`<tool_call>NAME<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>`."""

    name = "glm"
    marks = (HERMES_OPEN, HERMES_CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    @property
    def _tags(self) -> Tags:
        opening, end, value = map(self._mark, self.marks[2:5])
        return Tags(
            before=lambda key: f'{opening} {key} {end} "\\n"? {value}',
            closing=self.marks[5],
            after='"\\n"?',
            barred=(self.marks[2], HERMES_OPEN, HERMES_CLOSE),
        )

    def _rules(self, one_at_most: bool, names: Sequence[str]) -> list[str]:
        calls = [(HERMES_OPEN, f'"\\n"? call {self._mark(HERMES_CLOSE)}')]
        return [*self._marked(calls, is_repeated=not one_at_most), *self._value_rules()]

    def _call_rules(self, number: int, function: Function) -> Iterable[str]:
        yield rule(f"call_{number}", rf'{json.dumps(function.name)} "\n"? arguments_{number}')
        yield from self._argument_rules(number, function)


class PythonicFamily(Family):
    """`[NAME(KEY=VALUE, …)]`."""

    name = "pythonic"
    marks = ("<|python_start|>", "<|python_end|>")

    def _rules(self, one_at_most: bool, names: Sequence[str]) -> list[str]:
        start, end = map(self._mark, self.marks)
        more = "" if one_at_most else '(", " call)* '
        calls = f'call {more}"]" ({end})?'
        return [
            rule("start", f'TEXT | {start} "[" {calls} | "[" (LISTED | {calls})'),
            # A text that begins like a mark, or like the list of calls, is none.
            rule("TEXT", r"/(\s*([^\s\[<]|<[^|])(.|\n)*)?/"),
            rule("LISTED", r"/\s*([\w.-]*\s*|([^\s\w.-]|[\w.-]+\s*[^\s\w.(-])(.|\n)*)/"),
        ]

    def _call_rules(self, number: int, function: Function) -> Iterable[str]:
        yield rule(f"call_{number}", f'{json.dumps(f"{function.name}(")} arguments_{number} ")"')
        yield from pythonic_rules(f"arguments_{number}", function)


# What a template shows of a family. The first of which all is found counts: later ones are parts of earlier ones, or
# occur in their templates too.
SHOWN: Sequence[tuple[Sequence[str], type[Family]]] = (
    (harmony.SHOWN, HarmonyFamily),
    (("<function=",), QwenCoderFamily),
    (("<arg_key>",), GlmFamily),
    (("<tool_calls>",), HunyuanFamily),
    ((HERMES_OPEN,), HermesFamily),
    (("<|tool_calls_section_begin|>",), KimiFamily),
    (("<｜tool▁call▁begin｜>", "```json"), DeepSeekFamily),
    (("<｜tool▁call▁begin｜>",), DeepSeekV31Family),
    (("[ARGS]",), NewerMistralFamily),
    (("[TOOL_CALLS]",), MistralFamily),
    (("<|tool_call|>",), GraniteFamily),
    (("<|tool|>",), PhiFamily),
    (("(params_name1=",), PythonicFamily),
    (("python_tag",), LlamaFamily),
    (("ipython",), LlamaFamily),
)


def family_of(template: str, special_id: SpecialId) -> Family:
    """`template` is the model's for chats with tools. Raises InvalidRequest for one that shows no calls."""
    for shown, family in SHOWN:
        if all(text in template for text in shown):
            return family(special_id)
    raise InvalidRequest(
        "tool_choice='auto': how this model's chat template writes tool calls is not known; "
        "say required, or name the tool"
    )
