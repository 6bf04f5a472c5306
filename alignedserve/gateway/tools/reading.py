"""The reader of a choice's text, by the name that a prepared call has for it."""

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
    # As with a named reader, a call that had to be made ends with "stop".
    HARMONY: lambda tool, types: HarmonyReader(types.keys(), "stop" if tool else "tool_calls"),
}

# The readers that need the types of the tools' parameters, and those that need the tools' names alone.
_TYPED = (QwenCoderFamily.name, GlmFamily.name)
_NAMING = (LlamaFamily.name, HARMONY)


def types_for(name: str, tools: Sequence[Tool]) -> dict[str, dict[str, str]]:
    """Returns what the reader of this name needs to know of the tools, as `types` of its Reading."""
    if name in _TYPED:
        return types_of({tool.function.name: tool.function.parameters for tool in tools})
    return {tool.function.name: {} for tool in tools} if name in _NAMING else {}


class Reading(msgspec.Struct, frozen=True):
    """How the text of a choice is read."""

    # The name of the reader of what comes after the thoughts.
    name: str = TEXT
    # The only tool that can be called, if one was named.
    tool: str = ""
    # The types of the tools' parameters by the tools' names, as far as the reader needs them (types_for).
    types: dict[str, dict[str, str]] = {}
    # How thoughts are marked in the output, if it may have any.
    thinking: Thinking | None = None

    def new_reader(self) -> Reader:
        return ReasoningReader(self.thinking, self._answer_reader) if self.thinking else self._answer_reader()

    def _answer_reader(self) -> Reader:
        return _READERS[self.name](self.tool, self.types)
