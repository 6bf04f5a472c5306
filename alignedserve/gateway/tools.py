"""Tool calls: what a client offers, how a model is held to it, and how its text becomes calls again.

A call that has to be made is a structured output: the arguments alone where the tool is named, else a list of calls.
Where the model may choose, its text is read as its chat template shows calls: Hermes' and Qwen's
`<tool_call>{"name": …, "arguments": …}</tool_call>`, or Llama 3's bare JSON object. A call goes out when it is whole.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.types import InvalidRequest

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"


class Function(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    # a JSON schema
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: Function


class ChosenFunction(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str


class ChosenTool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: ChosenFunction


Tools = Annotated[list[Tool], Field(min_length=1)]
ToolChoice = Literal["none", "auto", "required"] | ChosenTool


# ---- what the output has to look like ----


def structure_of(
    tools: Sequence[Tool], choice: ToolChoice, one_at_most: bool
) -> StructuredOutputsParams | None:
    """None where the model may say what it likes. Raises InvalidRequest."""
    if isinstance(choice, ChosenTool):
        schemas = {tool.function.name: tool.function.parameters for tool in tools}
        name = choice.function.name
        if name not in schemas:
            raise InvalidRequest(f"tool_choice={name!r}: is none of the tools, {', '.join(schemas)}")
        return StructuredOutputsParams(json=schemas[name] or {"type": "object"})
    if choice != "required":
        return None
    definitions: dict[str, Any] = {}
    calls = [_call_schema(tool.function, definitions) for tool in tools]
    most = {"maxItems": 1} if one_at_most else {}
    items = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return StructuredOutputsParams(json=items | most | ({"$defs": definitions} if definitions else {}))


def _call_schema(function: Function, definitions: dict[str, Any]) -> dict[str, Any]:
    parameters = dict(function.parameters or {"type": "object"})
    # references are to the whole schema's definitions
    own = parameters.pop("$defs", {})
    for name, schema in own.items() if isinstance(own, dict) else ():
        if definitions.setdefault(name, schema) != schema:
            raise InvalidRequest(f"tools: two tools define {name!r} in $defs, and differently")
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def readable(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Templates write arguments as JSON themselves; clients send them back as the text that they were."""
    return [dict(message) | _with_objects(message.get("tool_calls")) for message in messages]


def _with_objects(calls: Any) -> dict[str, Any]:
    if not isinstance(calls, list):
        return {}
    return {"tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    match call:
        case {"function": {"arguments": str(text), **function}, **rest}:
            try:
                arguments = json.loads(text)
            except (ValueError, RecursionError):
                raise InvalidRequest("messages: a tool call's arguments must be JSON") from None
            return {**rest, "function": {**function, "arguments": arguments}}
    return call


# ---- from text to calls ----


@dataclass(frozen=True)
class Call:
    name: str
    # JSON
    arguments: str


@dataclass
class Read:
    """What is new."""

    content: str = ""
    calls: list[Call] = field(default_factory=list)


class Reader(ABC):
    """Of one choice."""

    # what "stop" is called when calls were made
    stop_reason = "tool_calls"

    @abstractmethod
    def feed(self, text: str) -> Read: ...

    @abstractmethod
    def end(self) -> Read:
        """There is no more text."""


class NamedReader(Reader):
    """All of it is the arguments."""

    # as OpenAI does for a call that had to be made
    stop_reason = "stop"

    def __init__(self, name: str) -> None:
        self._name = name
        self._text = ""

    def feed(self, text: str) -> Read:
        self._text += text
        return Read()

    def end(self) -> Read:
        return Read(calls=[Call(self._name, self._text)])


class JsonReader(Reader):
    """A call, or a list of calls, and nothing else; or just text."""

    def __init__(self) -> None:
        self._text = ""
        self._is_text = False

    def feed(self, text: str) -> Read:
        if self._is_text:
            return Read(text)
        self._text += text
        if self._text.lstrip()[:1] in ("", "{", "["):
            return Read()
        self._is_text = True
        return Read(self._text)

    def end(self) -> Read:
        if self._is_text:
            return Read()
        calls = _calls_in(self._text)
        return Read(calls=calls) if calls else Read(self._text)


class HermesReader(Reader):
    """Calls between tags, with text around them."""

    def __init__(self) -> None:
        self._text = ""
        # a line break between calls is no content
        self._skips_breaks = False

    def feed(self, text: str) -> Read:
        self._text += text
        read = Read()
        while True:
            if self._skips_breaks:
                self._text = self._text.lstrip("\n")
                self._skips_breaks = not self._text
            before, tag, after = self._text.partition(HERMES_OPEN)
            if not tag:
                keep = _overlap(self._text, HERMES_OPEN)
                read.content += self._text[: len(self._text) - keep]
                self._text = self._text[len(self._text) - keep :]
                return read
            inside, is_closed, rest = after.partition(HERMES_CLOSE)
            read.content += before
            self._text = tag + after
            if not is_closed:
                return read
            calls = _calls_in(inside)
            read.calls += calls
            read.content += "" if calls else tag + inside + is_closed
            self._text, self._skips_breaks = rest, bool(calls)

    def end(self) -> Read:
        text, self._text = self._text, ""
        return Read(text)


def reader_of(choice: ToolChoice, template: str) -> Callable[[], Reader]:
    """`template`: the model's, for when there are tools. Raises InvalidRequest where it shows no calls."""
    if isinstance(choice, ChosenTool):
        name = choice.function.name
        return lambda: NamedReader(name)
    if choice == "required":
        return JsonReader
    if HERMES_OPEN in template:
        return HermesReader
    if "ipython" in template or "python_tag" in template:
        return JsonReader
    raise InvalidRequest(
        "tool_choice='auto': how this model's chat template writes tool calls is not known; "
        "say required, or name the tool"
    )


def _calls_in(text: str) -> list[Call]:
    """None where there is anything else in it."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [_call(each) for each in (found if isinstance(found, list) else [found])]
    return [call for call in calls if call] if all(calls) else []


def _call(found: Any) -> Call | None:
    match found:
        case {"name": str(name), "arguments": dict(arguments)} | {
            "name": str(name),
            "parameters": dict(arguments),
        }:
            return Call(name, json.dumps(arguments, ensure_ascii=False))
    return None


def _overlap(text: str, tag: str) -> int:
    """Letters at the end of `text` that may be the beginning of `tag`."""
    longest = min(len(text), len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
