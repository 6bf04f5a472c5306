"""The bodies of Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field

from alignedserve.gateway.generation.body import GenerationBody
from alignedserve.gateway.generation.call import ServiceTier
from alignedserve.gateway.generation.chat import AnyChatBody, Conversation, ThinkingConfig, can_be_continued
from alignedserve.gateway.http.errors import THREAD_UNSUPPORTED, ApiError
from alignedserve.gateway.http.fields import BodyFields
from alignedserve.gateway.tools.bodies import ChosenFunction, ChosenTool, Function, Tool, ToolChoice
from alignedserve.sampling_params import SamplingParams
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.types import InvalidRequest

Block = dict[str, Any]


class Message(BodyFields):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class GivenTool(BodyFields):
    name: str
    description: str | None = None
    # A JSON schema. Tools without one are those that Anthropic's servers or clients define.
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    # Whether a stream has the call's arguments as the model writes them, before they are known to be JSON. None: a
    # header of the request decides (routes.py).
    eager_input_streaming: bool | None = None
    # See `CountTokensBody.will_continue`. KV is reused wherever prompts share a prefix.
    cache_control: dict[str, Any] | None = None


class Choice(BodyFields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(BodyFields):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(BodyFields):
    refused: ClassVar[Mapping[str, str]] = {"task_budget": ": the prompt has no place for a budget"}

    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(BodyFields):
    user_id: str | None = None


_NO_SUMMARIES = ": this server does not summarise conversations"


class CountTokensBody(AnyChatBody):
    form_name: ClassVar[str] = "output_config.format"
    refused: ClassVar[Mapping[str, str]] = {
        **GenerationBody.refused,
        "compaction": _NO_SUMMARIES,
        "container": ": this server runs no code",
        "enable_thinking": "; use thinking",
        "mcp_servers": ": this server calls no other servers",
        "reasoning": "; use thinking",
        "reasoning_effort": "; use thinking and output_config.effort",
    }

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    system: str | list[Block] | None = None
    tools: list[GivenTool] | None = None
    tool_choice: Choice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    # "auto" and "standard_only" are Anthropic's, the others are OpenAI's.
    service_tier: Any = None
    stop_sequences: list[str] | None = None
    # Accepted without effect.
    metadata: Metadata | None = None
    # See `will_continue`.
    cache_control: dict[str, Any] | None = None
    # A conversation that Anthropic's servers store, so that calls have only the last messages. Refused from its first
    # call on: an answer to the last messages alone would be wrong.
    thread: Any = None
    # Edits of the conversation. A summary is refused. Edits that leave something out are ignored: the prompt has the
    # whole conversation.
    context_management: Any = None

    @property
    def will_continue(self) -> bool:
        """Also true if anything is marked for the cache."""
        said = [self.system, *(message.content for message in self.messages)]
        blocks = (block for content in said if isinstance(content, list) for block in content)
        marks = [self.cache_control, *(tool.cache_control for tool in self.tools or ())]
        return super().will_continue or any(marks) or any(block.get("cache_control") for block in blocks)

    @property
    def names(self) -> Mapping[str, str]:
        return {"prompt": "messages", "stop": "stop_sequences"}

    @property
    def thinks(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def shows_reasoning(self) -> bool:
        return super().shows_reasoning and self.thinks

    @property
    def tier(self) -> ServiceTier | None:
        """The service tier. Raises InvalidRequest."""
        if self.service_tier == "standard_only":
            return "default"
        found = next((tier for tier in get_args(ServiceTier) if tier == self.service_tier), None)
        if found is None and self.service_tier is not None:
            raise InvalidRequest(f"service_tier={self.service_tier!r}: must be auto or standard_only")
        return found

    def conversation(self) -> Conversation:
        """Returns the chat in the form of all APIs. Raises ApiError and InvalidRequest."""
        if self.thread:
            message = "thread: this server stores no conversations; send all messages with each call"
            raise ApiError(400, message, param="thread", code=THREAD_UNSUPPORTED)
        if self._compacts:
            raise InvalidRequest(f"context_management: not supported by this server{_NO_SUMMARIES}")
        messages = list(_messages_of(self.messages))
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": _text(self.system, "system")})
        choice = self.tool_choice or Choice(type="auto")
        tools = [] if choice.type == "none" else self.functions
        if choice.type in ("any", "tool") and not tools:
            raise InvalidRequest("tool_choice: there are no tools that could be called")
        one_at_most = bool(choice.disable_parallel_tool_use)
        effort = self.output_config.effort if self.output_config else None
        return Conversation(
            messages,
            tools,
            _choice(choice),
            one_at_most,
            (effort or "medium") if self.thinks else "none",
            is_continued=can_be_continued(messages),
        )

    @property
    def _compacts(self) -> bool:
        match self.context_management:
            case {"edits": [*edits]}:
                return any(
                    isinstance(edit, dict) and str(edit.get("type")).startswith("compact") for edit in edits
                )
        return False

    @property
    def ignored(self) -> list[str]:
        """The names of parameters that are ignored."""
        others = [f"tools.{kind}" for kind in dict.fromkeys(self.other_tools)]
        return (["context_management"] if self.context_management else []) + others

    @property
    def functions(self) -> list[Tool]:
        return [_tool(each) for each in self.tools or [] if each.input_schema is not None]

    @property
    def eagerness(self) -> dict[str, bool | None]:
        """`eager_input_streaming` of the tools that the prompt describes, by name."""
        return {
            each.name: each.eager_input_streaming
            for each in self.tools or []
            if each.input_schema is not None
        }

    @property
    def other_tools(self) -> list[str]:
        """The types of tools that the prompt omits."""
        return [each.type or each.name for each in self.tools or [] if each.input_schema is None]

    def sampling_params(self) -> SamplingParams:
        return self.params(None, None, self._form())

    def _form(self) -> StructuredOutputsParams | None:
        form = self.output_format or (self.output_config.format if self.output_config else None)
        return None if form is None else StructuredOutputsParams(json=form.json_schema)


class MessagesBody(CountTokensBody):
    max_tokens: int

    def sampling_params(self) -> SamplingParams:
        if self.stop_sequences is not None and self.stop is not None:
            raise InvalidRequest("stop: not together with stop_sequences")
        more = {"stop": self.stop_sequences} if self.stop_sequences else {}
        return self.params(self.max_tokens, None, self._form(), **more)


def _messages_of(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    for message in messages:
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _turn(message.content)
        else:
            yield from _asked(message.role, message.content)


def _asked(role: str, blocks: Sequence[Block]) -> Iterator[dict[str, Any]]:
    """Yields the messages of a user's turn. Tool results are messages of their own, before the user's text."""
    rest = []
    for block in blocks:
        match block:
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                # Some clients send false or 0 for an empty result.
                content = block.get("content")
                text = _text(content, "messages") if content else ""
                yield {"role": "tool", "tool_call_id": call_id, "content": text}
            case _:
                rest.append(block)
    if rest:
        yield {"role": role, "content": _text(rest, "messages")}


def _turn(blocks: Sequence[Block]) -> dict[str, Any]:
    """Returns the assistant's turn."""
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(text)}:
                thoughts.append(text)
            case {"type": "redacted_thinking"}:
                pass
            case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": dict(given)}:
                function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
                calls.append({"id": call_id, "type": "function", "function": function})
            case _:
                raise _unsupported(block, "messages")
    found: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts else None}
    if thoughts:
        found["reasoning_content"] = "".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found


def _text(content: Any, name: str) -> str:
    """Returns the text. Raises InvalidRequest if the content is neither a text nor a list of blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(
            f"{name}: the content of a block is {content!r:.100}; must be a string or a list"
        )
    texts = []
    for block in content:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "document", "citations": {"enabled": True}}:
                raise InvalidRequest(f"{name}: a document with citations is not supported: answers have none")
            case {"type": "document", "source": {"type": "text", "data": str(text)}}:
                texts.append(text)
            case _:
                raise _unsupported(block, name)
    return "\n".join(texts)


def _unsupported(block: Any, name: str) -> InvalidRequest:
    kind = block.get("type") if isinstance(block, dict) else None
    return InvalidRequest(
        f"{name}: a block of type {kind!r} is not complete, or not supported: the model takes text only"
    )


def _tool(given: GivenTool) -> Tool:
    """Raises InvalidRequest."""
    try:
        function = Function(
            name=given.name, description=given.description, parameters=given.input_schema, strict=given.strict
        )
    except ValueError:
        raise InvalidRequest(f"tools: {given.name!r} is not a valid tool name") from None
    return Tool(type="function", function=function)


def _choice(choice: Choice) -> ToolChoice:
    if choice.type == "tool":
        return ChosenTool(type="function", function=ChosenFunction(name=choice.name or ""))
    return "required" if choice.type == "any" else "auto"
