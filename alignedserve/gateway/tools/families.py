"""How a model writes calls that it may make or not, by what its chat template shows of them.

A grammar holds the calls of functions that are `strict`, and holds where there may be one call only: text is free, and
once a call begins, it is of one of the tools, with arguments as its schema has them (any, for a tool that is not
strict). Arguments that are written one by one, not as a JSON object, are held in keyed_grammar.py.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from alignedserve.gateway.tools import harmony
from alignedserve.gateway.tools.bodies import Function, Tool
from alignedserve.gateway.tools.keyed_grammar import Tags, json_rule, pythonic_rules, rule, tagged_rules
from alignedserve.gateway.tools.readers import HERMES_CLOSE, HERMES_OPEN
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

    def structure(self, tools: Sequence[Tool], one_at_most: bool) -> StructuredOutputsParams | None:
        """Returns the grammar of the text, or None if it needs or has none."""
        if not one_at_most and not any(tool.function.strict for tool in tools):
            return None
        rules = self._rules(one_at_most)
        rules.append(rule("call", " | ".join(f"call_{n}" for n in range(len(tools)))))
        for number, tool in enumerate(tools):
            rules += self._call_rules(number, tool.function)
        return StructuredOutputsParams(grammar="\n".join(rules))

    @abstractmethod
    def _rules(self, one_at_most: bool) -> list[str]:
        """Returns the rules of the grammar around `call`."""

    def _call_rules(self, number: int, function: Function) -> list[str]:
        """Returns the rules of the calls of one function, which is that of this number."""
        before, after = self._around(function.name)
        asked = {"type": "object"} | ((function.parameters or {}) if function.strict else {})
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

    def _marked(self, openings: Sequence[str], calls: str, is_repeated: bool) -> list[str]:
        """Returns the rules of free text in which one of `openings` begins `calls`."""
        start = f"(opening {calls})* text" if is_repeated else f"opening {calls} | text"
        return [
            rule("start", start),
            rule("opening", " | ".join(f"opening_{n}" for n in range(len(openings)))),
            *(self._up_to(f"opening_{n}", mark) for n, mark in enumerate(openings)),
            rule("text", "TEXT"),
            rule("TEXT", r"/(.|\n)*/"),
        ]

    def _up_to(self, name: str, mark: str) -> str:
        """Returns the rule of this name: free text up to the mark, and the mark."""
        # A token ends free text wherever it comes; a text does so where it comes first.
        lazy = "" if self._special_id(mark) is not None else "[lazy]"
        return rule(f"{name}{lazy}", f"TEXT {self._mark(mark)}")


class HermesFamily(Family):
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, with text around it."""

    name = "hermes"
    marks = (HERMES_OPEN, HERMES_CLOSE)

    def _rules(self, one_at_most: bool) -> list[str]:
        return self._marked([HERMES_OPEN], rf'"\n" call "\n" {self._mark(HERMES_CLOSE)}', not one_at_most)


class LlamaFamily(Family):
    """A JSON object, bare. A grammar holds no call after a text, so that such a call is none where there is one."""

    name = "json-in-text"
    held_name = "json"

    def _rules(self, one_at_most: bool) -> list[str]:
        calls = "call" if one_at_most else 'call | "[" call (", " call)* "]"'
        return [rule("start", f"TEXT | {calls}"), rule("TEXT", r"/(\s*[^\s{\[](.|\n)*)?/")]

    def _around(self, name: str) -> tuple[str, str]:
        return json.dumps(f'{{"name": "{name}", "parameters": '), '"}"'


class DeepSeekFamily(Family):
    """`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>…`: the name, and JSON. V3.1 writes less around it than V3 and R1
    do."""

    name = "deepseek"
    marks = (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    )
    is_fenced = True

    def _rules(self, one_at_most: bool) -> list[str]:
        _, call, sep, end, last = map(self._mark, self.marks)
        before = f'{call} "function" {sep}' if self.is_fenced else call
        one = f"{before} call {end}"
        calls = one if one_at_most else rf'{one} ("\n" {one})*'
        return self._marked(self.marks[:1], f"{calls} {last}", is_repeated=False)

    def _around(self, name: str) -> tuple[str, str]:
        if self.is_fenced:
            return json.dumps(f"{name}\n```json\n"), json.dumps("\n```")
        return f"{json.dumps(name)} {self._mark(self.marks[2])}", ""


class DeepSeekV31Family(DeepSeekFamily):
    name = "deepseek"
    is_fenced = False


class ListFamily(Family):
    """A mark, and then a list of calls in JSON; a mark may close it."""

    # Each of them may begin calls.
    openings: ClassVar[Sequence[str]]
    closing: ClassVar[str] = ""

    def _rules(self, one_at_most: bool) -> list[str]:
        calls = '"[" call "]"' if one_at_most else '"[" call (", " call)* "]"'
        closing = f"({self._mark(self.closing)})?" if self.closing else ""
        return self._marked(self.openings, f"{calls} {closing}".rstrip(), is_repeated=False)


class MistralFamily(ListFamily):
    """`[TOOL_CALLS]`, and then the list."""

    name = "mistral-list"
    marks = openings = ("[TOOL_CALLS]",)


class GraniteFamily(ListFamily):
    """`<|tool_call|>`, and then the list."""

    name = "granite"
    marks = ("<|tool_call|>", "<|/tool_call|>")
    openings = ("<|tool_call|>", HERMES_OPEN)


class PhiFamily(ListFamily):
    """The same, or `functools` in place of the mark."""

    name = "phi"
    marks = ("<|tool_call|>", "<|/tool_call|>")
    openings = ("<|tool_call|>", "functools")
    closing = "<|/tool_call|>"


class HunyuanFamily(ListFamily):
    """`<tool_calls>[…]</tool_calls>`: Hunyuan's and Jamba's."""

    name = "hunyuan"
    marks = ("<tool_calls>", "</tool_calls>")
    openings = ("<tool_calls>",)
    closing = "</tool_calls>"


class NewerMistralFamily(Family):
    """`[TOOL_CALLS]NAME[ARGS]{…}`."""

    name = "mistral"
    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def _rules(self, one_at_most: bool) -> list[str]:
        return self._marked(self.marks[:1], "call", is_repeated=not one_at_most)

    def _around(self, name: str) -> tuple[str, str]:
        return f"{json.dumps(name)} {self._mark(self.marks[1])}", ""


class KimiFamily(Family):
    """`<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}…`."""

    name = "kimi"
    marks = (
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    )

    def _rules(self, one_at_most: bool) -> list[str]:
        _, call, _, end, last = map(self._mark, self.marks)
        one = f"{call} call {end}"
        calls = one if one_at_most else f"({one})+"
        return self._marked(self.marks[:1], f"{calls} {last}", is_repeated=False)

    def _around(self, name: str) -> tuple[str, str]:
        return f"{json.dumps(f'functions.{name}:')} /[0-9]{{1,4}}/ {self._mark(self.marks[2])}", ""


class HarmonyFamily(Family):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`: gpt-oss. Messages of its
    channels may come before."""

    name = "harmony"
    marks = harmony.MARKS

    def forced(self, tools: Sequence[Tool]) -> StructuredOutputsParams:
        """Returns the grammar of a call of one of the tools, by their schemas."""
        rules = [rule("start", f"{self._mark(harmony.CHANNEL)} call")]
        rules.append(rule("call", " | ".join(f"call_{n}" for n in range(len(tools)))))
        for number, tool in enumerate(tools):
            rules += self._call_rules(number, tool.function.model_copy(update={"strict": True}))
        return StructuredOutputsParams(grammar="\n".join(rules))

    def _rules(self, one_at_most: bool) -> list[str]:
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
        return f'{json.dumps(f"commentary to=functions.{name} ")} {constrain} "json" {message}', ""


class QwenCoderFamily(Family):
    """`<tool_call><function=NAME><parameter=KEY>…</parameter></function></tool_call>`."""

    name = "qwen-coder"
    marks = (HERMES_OPEN, HERMES_CLOSE)

    def _rules(self, one_at_most: bool) -> list[str]:
        return self._marked(
            [HERMES_OPEN], rf'"\n" call "\n" {self._mark(HERMES_CLOSE)}', is_repeated=not one_at_most
        )

    def _call_rules(self, number: int, function: Function) -> list[str]:
        name, head = f"arguments_{number}", json.dumps(f"<function={function.name}>\n")
        tags = Tags(lambda key: f'"<parameter=" {key} ">\\n"', "\n</parameter>", '"\\n"')
        arguments = tagged_rules(name, function, tags, self._up_to, self._mark)
        return [rule(f"call_{number}", f'{head} {name} "</function>"'), *arguments]


class GlmFamily(Family):
    """`<tool_call>NAME<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>`."""

    name = "glm"
    marks = (HERMES_OPEN, HERMES_CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def _rules(self, one_at_most: bool) -> list[str]:
        return self._marked([HERMES_OPEN], f"call {self._mark(HERMES_CLOSE)}", is_repeated=not one_at_most)

    def _call_rules(self, number: int, function: Function) -> list[str]:
        name, head = f"arguments_{number}", json.dumps(f"{function.name}\n")
        opening, end, value = map(self._mark, self.marks[2:5])
        tags = Tags(lambda key: f'{opening} {key} {end} "\\n" {value}', self.marks[5], '"\\n"')
        return [
            rule(f"call_{number}", f"{head} {name}"),
            *tagged_rules(name, function, tags, self._up_to, self._mark),
        ]


class PythonicFamily(Family):
    """`[NAME(KEY=VALUE, …)]`."""

    name = "pythonic"
    marks = ("<|python_start|>", "<|python_end|>")

    def _rules(self, one_at_most: bool) -> list[str]:
        start, end = map(self._mark, self.marks)
        calls = '"[" call "]"' if one_at_most else '"[" call (", " call)* "]"'
        return [
            rule("start", f"TEXT | ({start})? {calls} ({end})?"),
            # Text that begins like a list, or like the mark, is none.
            rule("TEXT", r"/(\s*([^\s\[<]|<[^|])(.|\n)*)?/"),
        ]

    def _call_rules(self, number: int, function: Function) -> list[str]:
        name = f"arguments_{number}"
        head = json.dumps(f"{function.name}(")
        return [rule(f"call_{number}", f'{head} {name} ")"'), *pythonic_rules(name, function)]


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
