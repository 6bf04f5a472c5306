"""Chats of any API: their form after parsing, and the prompt and parameters that template, tools and limits make of
it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from msgspec.structs import replace

from alignedserve.gateway.generation.body import GenerationBody
from alignedserve.gateway.generation.call import AnswerSpec, Call
from alignedserve.gateway.generation.endpoint import call_of, check_body, checked_prompts
from alignedserve.gateway.http.fields import BodyFields
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.tools.bodies import ChosenTool, Tool, ToolChoice, structure_of
from alignedserve.gateway.tools.calls import arguments_of
from alignedserve.gateway.tools.families import HarmonyFamily
from alignedserve.gateway.tools.harmony import FINAL, effort_of, thoughts_before
from alignedserve.gateway.tools.reading import HARMONY, JSON, NAMED, TextReading, format_of, types_for
from alignedserve.gateway.tools.reasoning import Thinking
from alignedserve.sampling_params import SamplingParams
from alignedserve.structured_outputs import StructuredOutputsParams, Thoughts
from alignedserve.types import InvalidRequest

# ---- its form after parsing, and the input that its template reads ---------------------------------------------------


@dataclass(frozen=True)
class Conversation:
    # In the form of OpenAI's chat completions, which templates expect.
    messages: Sequence[dict[str, Any]]
    # The tools that the model may call.
    tools: Sequence[Tool] = ()
    choice: ToolChoice = "auto"
    one_call_at_most: bool = False
    # Reasoning effort, if the template supports it. "none": no reasoning.
    effort: str | None = None
    # Whether the answer continues the last message, which is the assistant's.
    is_continued: bool = False

    @property
    def begun(self) -> str:
        """The text of the last message if that is the assistant's. It is valid once the prompt is rendered."""
        last = self.messages[-1]
        content = last.get("content") if last.get("role") == "assistant" else None
        if isinstance(content, list):
            return "\n".join(part["text"] for part in content)
        return content or ""


class ThinkingConfig(BodyFields):
    """Anthropic's switch for reasoning, which DeepSeek's and Z.ai's APIs have too."""

    type: Literal["enabled", "disabled", "adaptive"]
    # Accepted without effect.
    budget_tokens: int | None = None
    display: str | None = None


class AnyChatBody(GenerationBody):
    """The fields of all chat bodies, in addition to those of all calls."""

    chat_template_kwargs: dict[str, Any] | None = None
    # vLLM's field: false removes reasoning from the answer. SGLang's field: false leaves reasoning in the content.
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    # vLLM's field: false if the answer continues the last message.
    add_generation_prompt: bool | None = None

    @property
    def shows_reasoning(self) -> bool:
        """Whether the answer includes the reasoning."""
        return self.include_reasoning is not False

    def template_variables(self, effort: str | None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.add_generation_prompt is not None:
            found["add_generation_prompt"] = self.add_generation_prompt
        return found | template_variables(self.chat_template_kwargs, effort)


# The renderer sets these itself; variables of the same names would replace them.
_NOT_VARIABLES = (
    *("chat_template", "continue_final_message", "documents", "messages", "parses_special_tokens", "self"),
    *("tokenize", "tools"),
)


def template_variables(given: dict[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Returns a chat template's variables, such as Qwen3's enable_thinking. Raises InvalidRequest."""
    for name in _NOT_VARIABLES:
        if given and name in given:
            raise InvalidRequest(f"chat_template_kwargs: {name} is not a variable of a template")
    found: dict[str, Any] = {}
    if effort is not None:
        # Some templates have levels, others a switch.
        found["reasoning_effort"] = effort
        found["enable_thinking"] = found["thinking"] = effort != "none"
    return found | (given or {})


def is_continued_by(
    asked: bool | None, adds_prompt: bool | None, messages: Sequence[Mapping[str, Any]]
) -> bool:
    """Returns whether the answer continues the last message. Raises InvalidRequest if it can't."""
    if asked and adds_prompt:
        raise InvalidRequest("continue_final_message: not together with add_generation_prompt")
    if asked and not can_be_continued(messages):
        raise InvalidRequest(
            "continue_final_message: the last message must be the assistant's, with text and without calls"
        )
    return bool(asked)


def can_be_continued(messages: Sequence[Mapping[str, Any]]) -> bool:
    last = messages[-1] if messages else {}
    is_text = last.get("content") is not None and not last.get("tool_calls")
    return is_text and last.get("role") == "assistant"


def tool_variables(tools: Sequence[Tool], model: ServedModel) -> dict[str, Any]:
    """Returns the template variables that describe the tools."""
    if not tools:
        return {}
    found = [tool.model_dump(exclude_none=True) for tool in tools]
    if model.writes_harmony(has_tools=True):
        for tool in found:
            # The template requires a description.
            tool["function"].setdefault("description", "")
    return {"tools": found}


# Messages of these roles have content. Turns that call tools may have none, and so may results.
_SAYING = ("system", "developer", "user")


def readable(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with parsed arguments of calls. Templates take objects and write the JSON themselves;
    clients send text.

    Text that is no JSON is kept in an object: the model may have been cut off, and refusing it would end the
    conversation. Raises InvalidRequest for a message that lacks its content."""
    for number, message in enumerate(messages):
        if message.get("role") in _SAYING and message.get("content") is None:
            raise InvalidRequest(f"messages[{number}].content: must be a string or list")
    return [
        dict(message) | _with_objects(message.get("tool_calls")) | _with_thoughts(message)
        for message in messages
    ]


# Names of a turn's reasoning. Some clients send one, and some templates read the other.
_THOUGHTS = ("reasoning_content", "reasoning")


def _with_thoughts(message: Mapping[str, Any]) -> dict[str, Any]:
    found = (message.get(name) for name in _THOUGHTS)
    text = next((each for each in found if each and isinstance(each, str)), None)
    return {} if text is None else dict.fromkeys(_THOUGHTS, text)


def _with_objects(calls: Any) -> dict[str, Any]:
    if not isinstance(calls, list):
        return {}
    return {"tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    match call:
        case {"function": {"arguments": str() | None as text, **function}, **rest}:
            return {**rest, "function": {**function, "arguments": arguments_of(text or "")}}
    return call


# ---- its prompt and parameters ---------------------------------------------------------------------------------------


class TextSpec(AnswerSpec, frozen=True, kw_only=True):
    reading: TextReading = TextReading()
    # Whether the answer includes the reasoning.
    shows_reasoning: bool = True


AnyTextSpec = TypeVar("AnyTextSpec", bound=TextSpec)


@dataclass(frozen=True)
class _Tooling:
    """What tools mean for a chat: for its template, for the constraints on its output, and for parsing the text."""

    # Variables for the chat template.
    variables: dict[str, Any] = field(default_factory=dict)
    # Finds calls in the text.
    reading: TextReading = field(default_factory=TextReading)
    # Constraints on the output. `forced` is a call that has to be made. `free` is any of the calls that may be made, if
    # the client asks for no other format.
    forced: StructuredOutputsParams | None = None
    free: StructuredOutputsParams | None = None
    # Whether the tags around calls are special tokens, which the text would otherwise leave out.
    shows_special_tokens: bool = False


def chat_call(
    body: AnyChatBody, chat: Conversation, model: ServedModel, limits: CallLimits, spec: AnyTextSpec
) -> Call[AnyTextSpec]:
    """Returns the call of a chat. It completes `spec` by how the text is read. Raises ApiError and InvalidRequest."""
    check_body(body, model, limits)
    chat, ignored = _usable(chat, model)
    params = body.sampling_params()
    tooling = _tooling_of(chat, model, limits, has_format=params.structured_outputs is not None)
    structure_name = _constrain(params, body, tooling)
    limits.check(1, params, structure_name)
    is_bounded = params.truncate_prompt_tokens is None
    prompt = _prompt_of(body, chat, tooling, model, is_bounded)
    prompt = params.truncated(prompt, model.max_model_len)
    params = checked_prompts(body, [prompt], params, model, limits)
    thinking = _thinking_of(chat, model, prompt, params, tooling)
    reading = replace(tooling.reading, thinking=thinking)
    if body.separate_reasoning is False:
        reading = _with_tags(reading, has_tools=bool(chat.tools))
    spec = replace(spec, reading=reading, shows_reasoning=body.shows_reasoning)
    call = call_of(body, [prompt], params, structure_name, model, spec)
    awaits = "tool" if chat.tools else call.request.awaits
    request = replace(call.request, awaits=awaits, brings_results=_brings_results(chat.messages))
    return replace(call, request=request, ignored=ignored)


def _brings_results(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether there are results of tools behind the last answer."""
    for message in reversed(messages):
        match message.get("role"):
            case "tool":
                return True
            case "assistant":
                return False
    return False


def count_prompt(body: AnyChatBody, chat: Conversation, model: ServedModel) -> tuple[int, list[str]]:
    """Returns the number of tokens of the prompt, which need not fit, and the names of ignored parameters. Parameters
    of the output are not checked. Raises ApiError and InvalidRequest."""
    model.check_name(body.model)
    chat, ignored = _usable(chat, model)
    return len(_prompt_of(body, chat, _shown_of(chat, model), model, is_bounded=False)), ignored


def _prompt_of(
    body: AnyChatBody, chat: Conversation, tooling: _Tooling, model: ServedModel, is_bounded: bool = True
) -> list[int]:
    effort = effort_of(chat.effort) if tooling.reading.name == HARMONY else chat.effort
    variables = body.template_variables(effort) | tooling.variables
    messages = readable(chat.messages)
    return model.chat_ids(messages, variables, is_bounded=is_bounded, is_continued=chat.is_continued)


def _usable(chat: Conversation, model: ServedModel) -> tuple[Conversation, list[str]]:
    """Returns the chat without parameters that are ignored for this model, and their names.

    These are `tools`, if the chat template has no place for them and `tool_choice` is auto. Many clients send some with
    every call."""
    is_useless = bool(chat.tools) and chat.choice == "auto" and not model.has_place_for_tools
    return (dataclasses.replace(chat, tools=()), ["tools"]) if is_useless else (chat, [])


def _thinking_of(
    chat: Conversation, model: ServedModel, prompt: Sequence[int], params: SamplingParams, tooling: _Tooling
) -> Thinking | None:
    """Returns how reasoning is marked in the output. None: there is none, or the family's reader handles it. Puts the
    reasoning before a structured output in `params`."""
    if tooling.reading.name == HARMONY and not chat.is_continued:
        # A grammar of optional calls includes the messages before them.
        if params.structured_outputs and params.structured_outputs is not tooling.free:
            thoughts = thoughts_before("" if tooling.forced else FINAL)
            params.structured_outputs = dataclasses.replace(params.structured_outputs, thoughts=thoughts)
        return None
    thinking = model.thinking_after(prompt, has_tools=bool(chat.tools))
    if thinking and not thinking.is_open and chat.begun and chat.is_continued:
        # The answer has begun: it reasons only if it has begun to.
        is_open = chat.begun.rfind(thinking.open) > chat.begun.rfind(thinking.close)
        thinking = replace(thinking, is_open=True, is_begun=True) if is_open else None
    if thinking and params.structured_outputs:
        thoughts = Thoughts(thinking.close, None if thinking.is_open else thinking.open)
        params.structured_outputs = dataclasses.replace(params.structured_outputs, thoughts=thoughts)
    return thinking


def _with_tags(reading: TextReading, has_tools: bool) -> TextReading:
    """Returns the reading of a text that keeps its reasoning and the tags around it. Raises InvalidRequest."""
    if reading.name != HARMONY:
        return replace(reading, thinking=None)
    if has_tools:
        raise InvalidRequest(
            "separate_reasoning=False: not with tools; this model's calls are parsed with its reasoning"
        )
    return TextReading()


def _tooling_of(chat: Conversation, model: ServedModel, limits: CallLimits, has_format: bool) -> _Tooling:
    """`has_format`: the client asks for an output format. Raises ApiError and InvalidRequest if this model can't make
    calls."""
    tools, choice = chat.tools, chat.choice
    if not tools:
        harmony = model.writes_harmony(has_tools=False)
        return _harmony({}, chat, model, limits, has_format) if harmony else _Tooling()
    template = model.tool_template
    variables = tool_variables(tools, model)
    forced = structure_of(tools, choice, chat.one_call_at_most)
    if model.writes_harmony(has_tools=True):
        return _harmony(variables, chat, model, limits, has_format)
    if isinstance(choice, ChosenTool):
        return _Tooling(variables, TextReading(NAMED, choice.function.name), forced)
    if choice == "required":
        return _Tooling(variables, TextReading(JSON), forced)
    form = format_of(template)
    family, free = form.family(model.special_id), None
    if not has_format:
        free = family.structure(tools, chat.one_call_at_most, limits.max_grammar_bytes)
    name = form.held_name if free and form.held_name else form.name
    reading = TextReading(name, types=types_for(name, tools))
    return _Tooling(variables, reading, None, free, family.has_special_marks)


def _shown_of(chat: Conversation, model: ServedModel) -> _Tooling:
    """Returns the tooling as far as the prompt needs it, without constraints on the output. Raises ApiError and
    InvalidRequest if this model can't make calls."""
    variables = {}
    if chat.tools:
        # This raises ApiError.
        model.tool_template  # noqa: B018
        variables = tool_variables(chat.tools, model)
    name = HARMONY if model.writes_harmony(has_tools=bool(chat.tools)) else TextReading().name
    return _Tooling(variables, TextReading(name))


def _harmony(
    variables: dict[str, Any], chat: Conversation, model: ServedModel, limits: CallLimits, has_format: bool
) -> _Tooling:
    """In the harmony format the whole output has this form, forced calls too, and its special tokens are needed to read
    it."""
    family = HarmonyFamily(model.special_id)
    name, forced, free, most = "", None, None, limits.max_grammar_bytes
    if isinstance(chat.choice, ChosenTool):
        name = chat.choice.function.name
        forced = family.forced([tool for tool in chat.tools if tool.function.name == name][-1:], most)
    elif chat.choice == "required":
        forced = family.forced(chat.tools, most)
    elif chat.tools and not has_format:
        free = family.structure(chat.tools, chat.one_call_at_most, most)
    if chat.is_continued and (forced or free):
        raise InvalidRequest("tools: this model can't continue a message where tools are required or strict")
    begun = FINAL if chat.is_continued else ""
    reading = TextReading(HARMONY, name, types_for(HARMONY, chat.tools), begun=begun)
    return _Tooling(variables, reading, forced, free, family.has_special_marks)


def _constrain(params: SamplingParams, body: AnyChatBody, tooling: _Tooling) -> str:
    """Adds the constraints of tools to `params`. Returns the name of the parameter that determines the output's form.
    Raises InvalidRequest."""
    name = body.structure_name
    if tooling.forced:
        # The API's own format applies to text, and a call is not text. vLLM's field applies to every output.
        if body.structured_outputs is not None:
            raise InvalidRequest("tool_choice: a required call can't be combined with structured_outputs")
        params.structured_outputs, name = tooling.forced, "tools"
    elif tooling.free:
        params.structured_outputs, name = tooling.free, "tools"
    if tooling.shows_special_tokens:
        params.skip_special_tokens = False
    return name
