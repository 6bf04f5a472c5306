"""The grammars of optional calls, by the family of models that write them (reading.py has the formats).

A grammar constrains calls of `strict` functions, and limits the output to one call. Text is free; once a call begins,
it has to be of one of the tools, with arguments that follow its schema. If the tool is not strict, any arguments may
follow. A call begins where the family's reader finds one. keyed_grammar.py constrains arguments that are written one by
one rather than as a JSON object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from alignedserve.gateway.tools import harmony
from alignedserve.gateway.tools.bodies import Tool
from alignedserve.gateway.tools.family import BLANKS, Family, SpecialId
from alignedserve.gateway.tools.keyed_grammar import rule
from alignedserve.gateway.tools.marked_readers import HERMES_CLOSE, HERMES_OPEN, Marks
from alignedserve.structured_outputs import StructuredOutputsParams


class HermesFamily(Family):
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, with text around it."""

    marks = (HERMES_OPEN, HERMES_CLOSE)

    def _rules(self, one_at_most: bool, names: Sequence[str]) -> list[str]:
        return self._marked(
            [(HERMES_OPEN, f"BLANKS call BLANKS {self._mark(HERMES_CLOSE)}")], is_repeated=not one_at_most
        )


class LlamaFamily(Family):
    """A bare JSON object. The grammar allows no call after other text, so with a grammar such text remains text."""

    def _rules(self, one_at_most: bool, names: Sequence[str]) -> list[str]:
        more = "" if one_at_most else '("," BLANKS call)*'
        return [
            rule("start", f'TEXT | call | "[" (LISTED | BLANKS call {more} BLANKS "]")'),
            rule("TEXT", r"/(\s*[^\s{\[](.|\n)*)?/"),
            # A text that begins with a bracket. Characters that separate calls may also precede the first one.
            rule("LISTED", r"/[\s\[\],;]*([^\s\[\],;{](.|\n)*)?/"),
            BLANKS,
        ]

    def _around(self, name: str) -> tuple[str, str]:
        return json.dumps(f'{{"name": "{name}", "parameters": '), '"}"'


class SectionFamily(Family):
    """A mark before the section of calls, and one before each call. Models sometimes omit the former.

    `marks` are those before the section, the call and the arguments, and those after the call and the section."""

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
    """`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>…`: the name, and JSON. V3.1 writes less around it than V3 and R1."""

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
    is_fenced = False


class KimiFamily(SectionFamily):
    """`<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}…`."""

    marks = (
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    )

    def _around(self, name: str) -> tuple[str, str]:
        return f"{json.dumps(f'functions.{name}:')} /[0-9]{{1,4}}/ {self._mark(self.marks[2])}", ""


class ListFamily(Family):
    """A mark, and then a JSON list of calls or a single call. A mark may close it.

    A mark that is no special token begins calls only before a bracket, since it may be a word of the text."""

    def __init__(self, special_id: SpecialId, written: Marks) -> None:
        super().__init__(special_id)
        self._written = written
        self.marks = written.tokens or (*written.openings, *written.closings)

    def _rules(self, one_at_most: bool, names: Sequence[str]) -> list[str]:
        more = "" if one_at_most else '("," BLANKS "{" call)* '
        closings = " | ".join(map(self._mark, self._written.closings))
        closing = f"(BLANKS ({closings}))?" if closings else ""
        listed, single = f'BLANKS "{{" call {more}BLANKS "]" {closing}', f"call {closing}"
        calls = []
        for mark in self._written.openings:
            if self._special_id(mark) is not None:
                calls.append((mark, f'BLANKS ("[" {listed} | "{{" {single})'))
            else:
                calls += [(rf"/{re.escape(mark)}\s*\[/", listed), (rf"/{re.escape(mark)}\s*\{{/", single)]
        return self._marked(calls, is_repeated=False)

    def _around(self, name: str) -> tuple[str, str]:
        return json.dumps(f'"name": "{name}", "arguments": '), '"}"'


class NewerMistralFamily(Family):
    """`[TOOL_CALLS]NAME[ARGS]{…}`, with `[CALL_ID]ID` before `[ARGS]` in some versions."""

    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def _rules(self, one_at_most: bool, names: Sequence[str]) -> list[str]:
        return self._marked([(self.marks[0], "call")], is_repeated=not one_at_most)

    def _around(self, name: str) -> tuple[str, str]:
        arguments, call_id = map(self._mark, self.marks[1:])
        return f"{json.dumps(name)} ({call_id} /[a-zA-Z0-9_-]{{1,64}}/)? {arguments} BLANKS", ""


class HarmonyFamily(Family):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`: gpt-oss. Messages of its
    channels may come before."""

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
