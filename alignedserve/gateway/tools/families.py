"""How a model writes calls that it may make or not, by what its chat template shows of them.

A grammar holds the calls of functions that are `strict`, and holds where there may be one call only: text is free, and
once a call begins, it is of one of the tools, with arguments as its schema has them (any object, for a tool that is not
strict). Calls that are not written as JSON have no grammar: their arguments are as the model writes them.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from alignedserve.gateway.tools import harmony
from alignedserve.gateway.tools.bodies import Function, Tool
from alignedserve.gateway.tools.readers import HERMES_CLOSE, HERMES_OPEN
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.types import InvalidRequest

# Whitespace is as text/grammar.py has it for schemas.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

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
        if not rules:
            return None
        rules.append(_rule("call", " | ".join(f"call_{n}" for n in range(len(tools)))))
        for number, tool in enumerate(tools):
            opening, closing = (json.dumps(part) if part else "" for part in self._around(tool.function.name))
            rules.append(_rule(f"call_{number}", f"{opening} arguments_{number} {closing}".rstrip()))
            rules.append(_rule(f"arguments_{number}", f"%json {_schema(tool.function)}"))
        return StructuredOutputsParams(grammar="\n".join(rules))

    @abstractmethod
    def _rules(self, one_at_most: bool) -> list[str]:
        """Returns the rules of the grammar around `call`; none if there is no grammar."""

    def _around(self, name: str) -> tuple[str, str]:
        """Returns the text of a call before and after its arguments."""
        return f'{{"name": "{name}", "arguments": ', "}"

    def _mark(self, mark: str) -> str:
        """Returns what stands for the mark in a rule."""
        token_id = self._special_id(mark)
        return json.dumps(mark) if token_id is None else f"<[{token_id}]>"

    def _marked(self, opening: str, calls: str, is_repeated: bool) -> list[str]:
        """Returns the rules of free text in which `opening` begins `calls`."""
        # A token ends free text wherever it comes; a text does so where it comes first.
        lazy = "" if self._special_id(opening) is not None else "[lazy]"
        start = f"(opening {calls})* text" if is_repeated else f"opening {calls} | text"
        return [
            _rule("start", start),
            _rule(f"opening{lazy}", f"TEXT {self._mark(opening)}"),
            _rule("text", "TEXT"),
            _rule("TEXT", r"/(.|\n)*/"),
        ]


class HermesFamily(Family):
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, with text around it."""

    name = "hermes"
    marks = (HERMES_OPEN, HERMES_CLOSE)

    def _rules(self, one_at_most: bool) -> list[str]:
        return self._marked(HERMES_OPEN, rf'"\n" call "\n" {self._mark(HERMES_CLOSE)}', not one_at_most)


class LlamaFamily(Family):
    """A JSON object, bare. A grammar holds no call after a text, so that such a call is none where there is one."""

    name = "json-in-text"
    held_name = "json"

    def _rules(self, one_at_most: bool) -> list[str]:
        calls = "call" if one_at_most else 'call | "[" call (", " call)* "]"'
        return [_rule("start", f"TEXT | {calls}"), _rule("TEXT", r"/(\s*[^\s{\[](.|\n)*)?/")]

    def _around(self, name: str) -> tuple[str, str]:
        return f'{{"name": "{name}", "parameters": ', "}"


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
        return self._marked(self.marks[0], f"{calls} {last}", is_repeated=False)

    def _around(self, name: str) -> tuple[str, str]:
        if self.is_fenced:
            return f"{name}\n```json\n", "\n```"
        return name + self.marks[2], ""


class DeepSeekV31Family(DeepSeekFamily):
    name = "deepseek"
    is_fenced = False

    def _rules(self, one_at_most: bool) -> list[str]:
        # The mark between name and arguments would have to be a token in the middle of a text.
        return [] if self._special_id(self.marks[2]) is not None else super()._rules(one_at_most)


class MistralFamily(Family):
    """`[TOOL_CALLS]`, and then a list of calls in JSON."""

    name = "mistral-list"
    marks = ("[TOOL_CALLS]",)

    def _rules(self, one_at_most: bool) -> list[str]:
        calls = '"[" call "]"' if one_at_most else '"[" call (", " call)* "]"'
        return self._marked(self.marks[0], calls, is_repeated=False)


class UnboundFamily(Family):
    """Calls that no grammar describes here."""

    def _rules(self, one_at_most: bool) -> list[str]:
        return []


class NewerMistralFamily(UnboundFamily):
    """`[TOOL_CALLS]NAME[ARGS]{…}`."""

    name = "mistral"
    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")


class KimiFamily(UnboundFamily):
    """`<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}…`."""

    name = "kimi"
    marks = (
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    )


class GraniteFamily(UnboundFamily):
    """`<|tool_call|>`, and then a list of calls in JSON."""

    name = "granite"
    marks = ("<|tool_call|>", "<|/tool_call|>")


class PhiFamily(UnboundFamily):
    """The same, or `functools` in place of the mark."""

    name = "phi"
    marks = ("<|tool_call|>", "<|/tool_call|>")


class HunyuanFamily(UnboundFamily):
    """`<tool_calls>[…]</tool_calls>`: Hunyuan's and Jamba's."""

    name = "hunyuan"
    marks = ("<tool_calls>", "</tool_calls>")


class HarmonyFamily(UnboundFamily):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`: gpt-oss."""

    name = "harmony"
    marks = harmony.MARKS

    def forced(self, tools: Sequence[Tool]) -> StructuredOutputsParams:
        """Returns the grammar of a call of one of the tools, by their schemas."""
        strict = [tool.function.model_copy(update={"strict": True}) for tool in tools]
        channel, constrain, message = map(self._mark, (harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE))
        rules = [_rule("start", " | ".join(f"call_{n}" for n in range(len(strict))))]
        for number, function in enumerate(strict):
            to = json.dumps(f"commentary to=functions.{function.name} ")
            head = f'{channel} {to} {constrain} "json" {message}'
            rules.append(_rule(f"call_{number}", f"{head} %json {_schema(function)}"))
        return StructuredOutputsParams(grammar="\n".join(rules))


class QwenCoderFamily(UnboundFamily):
    """`<tool_call><function=NAME><parameter=KEY>…</parameter></function></tool_call>`."""

    name = "qwen-coder"
    marks = (HERMES_OPEN, HERMES_CLOSE)


class GlmFamily(UnboundFamily):
    """`<tool_call>NAME<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>`."""

    name = "glm"
    marks = (HERMES_OPEN, HERMES_CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


class PythonicFamily(UnboundFamily):
    """`[NAME(KEY=VALUE), …]`."""

    name = "pythonic"
    marks = ("<|python_start|>", "<|python_end|>")


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


def _schema(function: Function) -> str:
    asked: dict[str, Any] = {}
    if function.strict and function.parameters:
        asked = function.parameters
    schema = {"type": "object"} | asked | {"x-guidance": _JSON_OPTIONS}
    # A grammar with `::=` would be taken for GBNF. In JSON it can only be in a string, where it may be escaped.
    return json.dumps(schema).replace("::=", ":\\u003a=")


def _rule(name: str, body: str) -> str:
    return f"{name}: {body}"
