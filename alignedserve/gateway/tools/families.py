"""How a model writes calls that it may make or not, by what its chat template shows of them.

A grammar holds the calls of functions that are `strict`, and holds where there may be one call only: text is free, and
once a call begins, it is of one of the tools, with arguments as its schema has them (any, for a tool that is not
strict). A call begins where its reader finds one. Arguments that are written one by one, not as a JSON object, are held
in keyed_grammar.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import ClassVar

from alignedserve.gateway.tools import harmony
from alignedserve.gateway.tools.bodies import Tool
from alignedserve.gateway.tools.family import BLANKS, Family, SpecialId
from alignedserve.gateway.tools.keyed_families import GlmFamily, PythonicFamily, QwenCoderFamily
from alignedserve.gateway.tools.keyed_grammar import rule
from alignedserve.gateway.tools.marked_readers import HERMES_CLOSE, HERMES_OPEN
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.types import InvalidRequest


class HermesFamily(Family):
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, with text around it."""

    name = "hermes"
    marks = (HERMES_OPEN, HERMES_CLOSE)

    def _rules(self, one_at_most: bool, names: Sequence[str]) -> list[str]:
        return self._marked(
            [(HERMES_OPEN, f"BLANKS call BLANKS {self._mark(HERMES_CLOSE)}")], is_repeated=not one_at_most
        )


class LlamaFamily(Family):
    """A bare JSON object. A grammar allows no call after other text, so with a grammar such text stays text."""

    name = "json-in-text"
    held_name = "json"

    def _rules(self, one_at_most: bool, names: Sequence[str]) -> list[str]:
        more = "" if one_at_most else '("," BLANKS call)*'
        return [
            rule("start", f'TEXT | call | "[" (LISTED | BLANKS call {more} BLANKS "]")'),
            rule("TEXT", r"/(\s*[^\s{\[](.|\n)*)?/"),
            # A text that begins with a bracket. What stands between calls may come before the first one too.
            rule("LISTED", r"/[\s\[\],;]*([^\s\[\],;{](.|\n)*)?/"),
            BLANKS,
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
