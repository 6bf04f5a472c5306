"""The formats in which models write calls, and the readers of a choice's text by their names in a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

import msgspec

from alignedserve.gateway.tools import families, harmony, keyed_families, marked_readers
from alignedserve.gateway.tools.bodies import Tool
from alignedserve.gateway.tools.family import Family, SpecialId
from alignedserve.gateway.tools.harmony import HarmonyReader
from alignedserve.gateway.tools.json_readers import JsonInTextReader, JsonReader
from alignedserve.gateway.tools.keyed_readers import KeyedReader, Types, types_of
from alignedserve.gateway.tools.keyed_tags import GLM, QWEN_CODER, Keyed
from alignedserve.gateway.tools.marked_readers import HERMES_OPEN, Marks, marked_reader
from alignedserve.gateway.tools.pythonic_reader import PythonicReader
from alignedserve.gateway.tools.readers import NamedReader, Reader, TextReader
from alignedserve.gateway.tools.reasoning import ReasoningReader, Thinking
from alignedserve.types import InvalidRequest

TEXT: Final = "text"
NAMED: Final = "named"
JSON: Final = "json"
HARMONY: Final = "harmony"


@dataclass(frozen=True)
class CallFormat:
    # The reader's name in a call.
    name: str
    # Texts by which a chat template shows the format.
    shown: Sequence[str]
    # The grammar that constrains calls.
    family: Callable[[SpecialId], Family]
    # Marks or tags that its reader looks for, or a function that makes a reader.
    written: Marks | Keyed | Callable[[Types], Reader]
    # What the reader needs of the tools: their names, or the types of their parameters as well.
    needs: Literal["nothing", "names", "types"] = "nothing"
    # The reader's name if a grammar constrains the text, if it differs.
    held_name: str = ""

    def is_shown_by(self, template: str) -> bool:
        return all(text in template for text in self.shown)

    def new_reader(self, types: Types) -> Reader:
        match self.written:
            case Marks() as marks:
                return marked_reader(marks)
            case Keyed() as keyed:
                return KeyedReader(keyed, types)
            case make:
                return make(types)


def _listed(name: str, shown: str, marks: Marks) -> CallFormat:
    return CallFormat(name, (shown,), partial(families.ListFamily, written=marks), marks)


HARMONY_FORMAT: Final = CallFormat(HARMONY, harmony.SHOWN, families.HarmonyFamily, HarmonyReader, "names")
_LLAMA = CallFormat(
    "json-in-text", ("python_tag",), families.LlamaFamily, JsonInTextReader, "names", held_name=JSON
)
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
# Texts of later formats occur in templates of earlier ones, too.
FORMATS: Final = (
    HARMONY_FORMAT,
    CallFormat("qwen-coder", ("<function=",), keyed_families.QwenCoderFamily, QWEN_CODER, "types"),
    CallFormat("glm", ("<arg_key>",), keyed_families.GlmFamily, GLM, "types"),
    _listed("hunyuan", "<tool_calls>", marked_readers.HUNYUAN),
    CallFormat("hermes", (HERMES_OPEN,), families.HermesFamily, marked_readers.HERMES),
    CallFormat("kimi", ("<|tool_calls_section_begin|>",), families.KimiFamily, marked_readers.KIMI),
    CallFormat("deepseek", (_DEEPSEEK_CALL, "```json"), families.DeepSeekFamily, marked_readers.DEEPSEEK),
    CallFormat("deepseek", (_DEEPSEEK_CALL,), families.DeepSeekV31Family, marked_readers.DEEPSEEK),
    CallFormat("mistral", ("[ARGS]",), families.NewerMistralFamily, marked_readers.MISTRAL),
    _listed("mistral-list", "[TOOL_CALLS]", marked_readers.MISTRAL_LIST),
    _listed("granite", "<|tool_call|>", marked_readers.GRANITE),
    _listed("phi", "<|tool|>", marked_readers.PHI),
    CallFormat(
        "pythonic", ("(params_name1=",), keyed_families.PythonicFamily, lambda types: PythonicReader()
    ),
    _LLAMA,
    replace(_LLAMA, shown=("ipython",)),
)
_BY_NAME: Final = {each.name: each for each in FORMATS}


def format_of(template: str) -> CallFormat:
    """Returns the first format that a chat template for tools shows. Raises InvalidRequest if it shows none."""
    for each in FORMATS:
        if each.is_shown_by(template):
            return each
    raise InvalidRequest(
        "tool_choice='auto': the tool-call format of this model's chat template is unknown; "
        "use required, or name the tool"
    )


def types_for(name: str, tools: Sequence[Tool]) -> dict[str, dict[str, str]]:
    """Returns what the named reader needs of the tools: `types` of its TextReading."""
    needs = _BY_NAME[name].needs if name in _BY_NAME else "nothing"
    if needs == "types":
        return types_of({tool.function.name: tool.function.parameters for tool in tools})
    return {tool.function.name: {} for tool in tools} if needs == "names" else {}


class TextReading(msgspec.Struct, frozen=True):
    """How the text of a choice is parsed."""

    # The name of the reader for the text after the reasoning.
    name: str = TEXT
    # The only tool that can be called, if one is forced.
    tool: str = ""
    # Types of the tools' parameters by tool name, as far as the reader needs them (types_for).
    types: dict[str, dict[str, str]] = {}
    # How reasoning is marked in the output. None: there is none.
    thinking: Thinking | None = None
    # Marks in the prompt with which the text has begun.
    begun: str = ""

    def new_reader(self) -> Reader:
        if self.thinking:
            return ReasoningReader(self.thinking, self._answer_reader)
        reader = self._answer_reader()
        if self.begun:
            reader.feed(self.begun)
        return reader

    def _answer_reader(self) -> Reader:
        match self.name:
            case _ if self.name == TEXT:
                return TextReader()
            case _ if self.name == NAMED:
                return NamedReader(self.tool)
            case _ if self.name == JSON:
                return JsonReader()
            case _ if self.name == HARMONY and self.tool:
                # As with a named reader, a forced call ends with "stop".
                return HarmonyReader(self.types.keys(), "stop")
        return _BY_NAME[self.name].new_reader(self.types)
