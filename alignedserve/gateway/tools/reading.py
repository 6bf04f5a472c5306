"""The readers of a choice's text, by their names in a prepared call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from alignedserve.gateway.tools import keyed_tags, marked_readers
from alignedserve.gateway.tools.bodies import Tool
from alignedserve.gateway.tools.families import HarmonyFamily, LlamaFamily
from alignedserve.gateway.tools.harmony import HarmonyReader
from alignedserve.gateway.tools.json_readers import JsonInTextReader, JsonReader
from alignedserve.gateway.tools.keyed_families import GlmFamily, QwenCoderFamily
from alignedserve.gateway.tools.keyed_readers import KeyedReader, Types, types_of
from alignedserve.gateway.tools.marked_readers import HermesReader, marked_reader
from alignedserve.gateway.tools.pythonic_reader import PythonicReader
from alignedserve.gateway.tools.readers import NamedReader, Reader, TextReader
from alignedserve.gateway.tools.reasoning import ReasoningReader, Thinking

TEXT: Final = "text"
NAMED: Final = "named"
JSON: Final = "json"
HARMONY: Final = HarmonyFamily.name

_READERS: Mapping[str, Callable[[str, Types], Reader]] = {
    TEXT: lambda tool, types: TextReader(),
    NAMED: lambda tool, types: NamedReader(tool),
    JSON: lambda tool, types: JsonReader(),
    "json-in-text": lambda tool, types: JsonInTextReader(types),
    "hermes": lambda tool, types: HermesReader(),
    "deepseek": lambda tool, types: marked_reader(marked_readers.DEEPSEEK),
    "kimi": lambda tool, types: marked_reader(marked_readers.KIMI),
    "mistral": lambda tool, types: marked_reader(marked_readers.MISTRAL),
    "mistral-list": lambda tool, types: marked_reader(marked_readers.MISTRAL_LIST),
    "granite": lambda tool, types: marked_reader(marked_readers.GRANITE),
    "phi": lambda tool, types: marked_reader(marked_readers.PHI),
    "hunyuan": lambda tool, types: marked_reader(marked_readers.HUNYUAN),
    "qwen-coder": lambda tool, types: KeyedReader(keyed_tags.QWEN_CODER, types),
    "glm": lambda tool, types: KeyedReader(keyed_tags.GLM, types),
    "pythonic": lambda tool, types: PythonicReader(),
    # As with a named reader, a forced call ends with "stop".
    HARMONY: lambda tool, types: HarmonyReader(types.keys(), "stop" if tool else "tool_calls"),
}

# Readers that need the types of the tools' parameters, and readers that need only the tools' names.
_TYPED = (QwenCoderFamily.name, GlmFamily.name)
_NAMING = (LlamaFamily.name, HARMONY)


def types_for(name: str, tools: Sequence[Tool]) -> dict[str, dict[str, str]]:
    """Returns what the named reader needs of the tools: `types` of its Reading."""
    if name in _TYPED:
        return types_of({tool.function.name: tool.function.parameters for tool in tools})
    return {tool.function.name: {} for tool in tools} if name in _NAMING else {}


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
        return _READERS[self.name](self.tool, self.types)
