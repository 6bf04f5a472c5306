"""The reader of a choice's text, by the name that a prepared call has for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from alignedserve.gateway.tools import keyed_readers, marked_readers
from alignedserve.gateway.tools.families import HarmonyFamily
from alignedserve.gateway.tools.harmony import HarmonyReader
from alignedserve.gateway.tools.keyed_readers import KeyedReader, Types
from alignedserve.gateway.tools.marked_readers import marked_reader
from alignedserve.gateway.tools.pythonic_reader import PythonicReader
from alignedserve.gateway.tools.readers import (
    BlankReader,
    HermesReader,
    JsonReader,
    NamedReader,
    Reader,
    TextReader,
)
from alignedserve.gateway.tools.reasoning import ReasoningReader, Thinking

TEXT: Final = "text"
NAMED: Final = "named"
JSON: Final = "json"
HARMONY: Final = HarmonyFamily.name

_READERS: Mapping[str, Callable[[str, Types], Reader]] = {
    TEXT: lambda tool, types: TextReader(),
    NAMED: lambda tool, types: NamedReader(tool),
    JSON: lambda tool, types: JsonReader(),
    "json-in-text": lambda tool, types: JsonReader(finds_calls=True),
    "hermes": lambda tool, types: HermesReader(),
    "deepseek": lambda tool, types: marked_reader(marked_readers.DEEPSEEK),
    "kimi": lambda tool, types: marked_reader(marked_readers.KIMI),
    "mistral": lambda tool, types: marked_reader(marked_readers.MISTRAL),
    "mistral-list": lambda tool, types: marked_reader(marked_readers.MISTRAL_LIST),
    "granite": lambda tool, types: marked_reader(marked_readers.GRANITE),
    "phi": lambda tool, types: marked_reader(marked_readers.PHI),
    "hunyuan": lambda tool, types: marked_reader(marked_readers.HUNYUAN),
    "qwen-coder": lambda tool, types: KeyedReader(keyed_readers.QWEN_CODER, types),
    "glm": lambda tool, types: KeyedReader(keyed_readers.GLM, types),
    "pythonic": lambda tool, types: PythonicReader(),
    # As with a named reader, a call that had to be made ends with "stop".
    HARMONY: lambda tool, types: HarmonyReader(types.keys(), "stop" if tool else "tool_calls"),
}


class Reading(msgspec.Struct, frozen=True):
    """How the text of a choice is read."""

    # The name of the reader of what comes after the thoughts.
    name: str = TEXT
    # The only tool that can be called, if one was named.
    tool: str = ""
    # The types of the tools' parameters by the tools' names, for a reader that has to know either.
    types: dict[str, dict[str, str]] = {}
    # How thoughts are marked in the output, if it may have any.
    thinking: Thinking | None = None

    def new_reader(self) -> Reader:
        reader = _READERS[self.name](self.tool, self.types)
        if reader.openings:
            reader = BlankReader(reader)
        return ReasoningReader(self.thinking, reader) if self.thinking else reader
