"""The body of a new response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from alignedserve.gateway.generation.body import GenerationBody
from alignedserve.gateway.generation.chat import AnyChatBody, Conversation
from alignedserve.gateway.http.fields import BodyFields
from alignedserve.gateway.openai.responses.items import Item, messages_of
from alignedserve.gateway.tools.bodies import ChosenFunction, ChosenTool, Function, Tool, ToolChoice, allowed
from alignedserve.sampling_params import SamplingParams
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.types import InvalidRequest

LOGPROBS = "message.output_text.logprobs"


class Reasoning(BodyFields):
    effort: str | None = None
    # Accepted without effect: reasoning is shown in full.
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(BodyFields):
    type: Literal["text", "json_object", "json_schema"]
    # Fields of a JSON schema.
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    # Without effect: the output follows the schema in any case.
    strict: bool | None = None


class TextConfig(BodyFields):
    format: TextFormat | None = None
    # Accepted without effect.
    verbosity: str | None = None


class StreamOptions(BodyFields):
    include_obfuscation: bool | None = None


# Longest id of a response, in characters.
MAX_RESPONSE_ID_CHARS = 128
# Names and values that a client attaches to an object.
Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[Key, Value], Field(max_length=16)]


class ConversationName(BodyFields):
    id: Annotated[str, Field(max_length=MAX_RESPONSE_ID_CHARS)]


class ResponseBody(AnyChatBody):
    form_name: ClassVar[str] = "text.format"
    refused: ClassVar[Mapping[str, str]] = {
        **GenerationBody.refused,
        "context_management": ": this server does not summarise conversations",
        "continue_final_message": "",
        "enable_thinking": "; use reasoning.effort",
        "prompt": ": this server stores no prompts",
        "reasoning_effort": "; use reasoning.effort",
        "return_tokens_as_token_ids": "",
        "thinking": "; use reasoning.effort",
    }

    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: int | None = None
    # Validating a length also finds halves of surrogate pairs.
    previous_response_id: Annotated[str, Field(max_length=MAX_RESPONSE_ID_CHARS)] | None = None
    conversation: ConversationName | Annotated[str, Field(max_length=MAX_RESPONSE_ID_CHARS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: Metadata | None = None
    # A response is stored unless this is false.
    store: bool | None = None
    background: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # Accepted without effect.
    max_tool_calls: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    # OpenAI's name of a chat, or of several.
    prompt_cache_key: str | None = None

    @property
    def will_continue(self) -> bool:
        is_next = self.previous_response_id is not None or self.conversation is not None
        return super().will_continue or is_next or bool(self.prompt_cache_key)

    @property
    def conversation_id(self) -> str | None:
        given = self.conversation
        return given.id if isinstance(given, ConversationName) else given

    @property
    def names(self) -> Mapping[str, str]:
        return {
            "max_tokens": "max_output_tokens",
            "prompt": "input",
            "messages": "input",
            "logprobs": "top_logprobs",
        }

    @property
    def num_logprobs(self) -> int | None:
        """The number of top tokens with each token. None: no log-probabilities."""
        return self.top_logprobs or 0 if self.top_logprobs or LOGPROBS in (self.include or ()) else None

    @property
    def num_kept_logprobs(self) -> int | None:
        # A streamed answer also ends with the whole of it.
        return self.num_logprobs

    def conversation_of(self, items: Sequence[Item]) -> Conversation:
        """Returns the chat. `items` are all items of the conversation."""
        messages = messages_of(items)
        if self.instructions is not None:
            messages.insert(0, {"role": "developer", "content": self.instructions})
        tools, choice = self._allowed(), self._choice()
        if choice not in ("auto", "none") and not tools:
            raise InvalidRequest("tool_choice: there are no tools that could be called")
        effort = self.reasoning.effort if self.reasoning else None
        return Conversation(
            messages,
            [] if choice == "none" else tools,
            "auto" if choice == "none" else choice,
            self.parallel_tool_calls is False,
            effort,
        )

    @property
    def functions(self) -> list[Tool]:
        """The functions among the tools. Others are tools that OpenAI's servers run, and the prompt omits them."""
        given = [tool for tool in self.tools or [] if tool.get("type") == "function"]
        return [Tool(type="function", function=_function(tool)) for tool in given]

    @property
    def other_tools(self) -> list[str]:
        """The types of the other tools."""
        return [str(tool.get("type")) for tool in self.tools or [] if tool.get("type") != "function"]

    def sampling_params(self) -> SamplingParams:
        return self.params(self.max_output_tokens, self.num_logprobs, self._form())

    def _form(self) -> StructuredOutputsParams | None:
        form = self.text.format if self.text else None
        if form is None or form.type == "text":
            return None
        if form.type == "json_schema":
            if form.json_schema is None:
                raise InvalidRequest("text: a format of type json_schema must have a schema")
            return StructuredOutputsParams(json=form.json_schema)
        return StructuredOutputsParams(json_object=True)

    def _allowed(self) -> list[Tool]:
        """Returns the functions that the prompt describes."""
        match self.tool_choice:
            case {"type": "allowed_tools", "tools": [*found]}:
                return allowed(self.functions, {name for each in found if (name := _function_name(each))})
        return self.functions

    def _choice(self) -> ToolChoice:
        match self.tool_choice:
            case None:
                return "auto"
            case "none" | "auto" | "required" as choice:
                return choice  # type: ignore[no-any-return]
            case {"type": "function", "name": str(name)}:
                return ChosenTool(type="function", function=ChosenFunction(name=name))
            case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*_]}:
                return mode  # type: ignore[no-any-return]
        raise InvalidRequest("tool_choice: must be none, auto, required, or a function by name")


def _function_name(tool: Any) -> str | None:
    """Returns None for a tool of another type."""
    match tool:
        case {"type": "function", "name": str(name)}:
            return name
    return None


def _function(tool: Mapping[str, Any]) -> Function:
    """Raises InvalidRequest."""
    try:
        given = {key: tool.get(key) for key in ("name", "description", "parameters", "strict")}
        return Function.model_validate(given)
    except ValueError:
        raise InvalidRequest("tools: a function must have a name, and its parameters are a schema") from None
