"""The bodies of OpenAI's completions and chats, with vLLM's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from alignedserve.gateway.generation.body import GenerationBody
from alignedserve.gateway.generation.chat import AnyChatBody, Conversation, ThinkingConfig, is_continued_by
from alignedserve.gateway.http.fields import BodyFields
from alignedserve.gateway.tools.bodies import AnyChoice, Tools, offered
from alignedserve.sampling_params import SamplingParams
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.types import InvalidRequest


class TextFormat(BodyFields):
    type: Literal["text"]


class JsonObjectFormat(BodyFields):
    type: Literal["json_object"]


class JsonSchema(BodyFields):
    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    # Without effect: the output follows the schema in any case.
    strict: bool | None = None


class JsonSchemaFormat(BodyFields):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class StructuralTagFormat(BodyFields):
    """vLLM's and SGLang's: either xgrammar's `format`, or the older `structures` with their `triggers`."""

    type: Literal["structural_tag"]
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


AnyFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat
ResponseFormat = Annotated[AnyFormat, Field(discriminator="type")]


def structure_of_format(form: AnyFormat | None) -> StructuredOutputsParams | None:
    match form:
        case StructuralTagFormat():
            return StructuredOutputsParams(structural_tag=form.model_dump(exclude_none=True))
        case JsonSchemaFormat(json_schema=JsonSchema(json_schema=dict(schema))):
            return StructuredOutputsParams(json=schema)
        case JsonObjectFormat() | JsonSchemaFormat():
            return StructuredOutputsParams(json_object=True)
    return None


# OpenAI's default for completions. Chats continue until the model ends them.
COMPLETION_MAX_TOKENS = 16

TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]


def _checked_prompt(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(given)
    except ValidationError:
        # pydantic would explain for each type why the prompt does not match it.
        raise PydanticCustomError(
            "prompt", "must be a text, token ids, or a list of either, and not empty"
        ) from None


Prompt = Annotated[
    str
    | TokenIds
    | Annotated[list[str], Field(min_length=1, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)],
    WrapValidator(_checked_prompt),
]
Messages = Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]


class StreamOptions(BodyFields):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    # vLLM's field: each chunk has the usage so far.
    continuous_usage_stats: bool | None = None


class ReasoningConfig(BodyFields):
    """OpenRouter's field."""

    refused: ClassVar[Mapping[str, str]] = {"max_tokens": ": a model ends its reasoning itself"}

    effort: str | None = None
    enabled: bool | None = None
    # Whether the answer omits the reasoning.
    exclude: bool | None = None


class ReasoningFields(BodyFields):
    """How much a model reasons, in the fields of several APIs."""

    # Only for templates that support it. OpenAI's levels; "none": no reasoning.
    reasoning_effort: str | None = None
    # The same in the APIs of OpenRouter, of DeepSeek and Z.ai, and of Qwen.
    reasoning: ReasoningConfig | None = None
    thinking: ThinkingConfig | None = None
    enable_thinking: bool | None = None

    @property
    def effort(self) -> str | None:
        """The reasoning effort. Raises InvalidRequest if parameters contradict each other."""
        levels = {self.reasoning_effort, self.reasoning.effort if self.reasoning else None} - {None}
        if len(levels) > 1:
            raise InvalidRequest("reasoning.effort: differs from reasoning_effort")
        level = next(iter(levels), None)
        switches = {
            self.reasoning.enabled if self.reasoning else None,
            self.thinking.type != "disabled" if self.thinking else None,
            self.enable_thinking,
            None if level is None else level != "none",
        } - {None}
        if len(switches) > 1:
            name = "enable_thinking" if self.thinking is None else "thinking"
            raise InvalidRequest(f"{name}: other parameters turn the reasoning on, or off")
        if level is None and switches:
            return "medium" if True in switches else "none"
        return level


class ChoicesBody(GenerationBody):
    """The fields that completions and chats share."""

    n: int | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # vLLM's field: log-probabilities of the prompt's tokens, each with this number of top tokens.
    prompt_logprobs: int | None = None
    # vLLM's field: the answer includes the token ids of itself and of the prompt.
    return_token_ids: bool | None = None
    # vLLM's field: log-probabilities name tokens by their ids.
    return_tokens_as_token_ids: bool | None = None
    # llama.cpp's field: a stream reports the progress of the prompt.
    return_progress: bool | None = None
    # Accepted without effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    # OpenAI's name of a chat, or of several.
    prompt_cache_key: str | None = None

    @property
    def will_continue(self) -> bool:
        return super().will_continue or bool(self.prompt_cache_key)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def includes_usage_so_far(self) -> bool:
        return self.includes_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    @property
    def reports_progress(self) -> bool:
        return bool(self.stream) and bool(self.return_progress)

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    def _choices_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: only allowed with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(f"prompt_logprobs={self.prompt_logprobs}: not available with stream=true")
        more = {} if self.n is None else {"n": self.n}
        form = structure_of_format(self.response_format)
        return self.params(max_tokens, logprobs, form, prompt_logprobs=self.num_prompt_logprobs, **more)


class CompletionBody(ChoicesBody):
    prompt: Prompt
    max_tokens: int | None = COMPLETION_MAX_TOKENS
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: None = None

    @property
    def names(self) -> Mapping[str, str]:
        return {"prompt_token_ids": "prompt"} | ({} if self.best_of is None else {"n": "best_of"})

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def is_only_echo(self) -> bool:
        """Whether the client asks only for the prompt, with or without log-probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def num_kept_logprobs(self) -> int | None:
        return None if self.stream or self.is_only_echo else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """An echoed prompt has as many log-probabilities as the output."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((each for each in asked if each is not None), default=None)

    def sampling_params(self) -> SamplingParams:
        """Returns the sampling parameters. Their `n` is the number of choices to generate: `best_of`, if given."""
        # Every request computes at least one token, even if only the echo is asked for.
        params = self._choices_params(1 if self.is_only_echo else self.max_tokens, self.logprobs)
        if self.best_of is None or self.best_of == params.n:
            return params
        if self.best_of < params.n:
            raise InvalidRequest(f"best_of={self.best_of}: must be at least n={params.n}")
        if self.stream:
            raise InvalidRequest(
                f"best_of={self.best_of}: more than n={params.n} is not possible with stream=true"
            )
        # The best choices are chosen by their log-probabilities.
        return replace(params, n=self.best_of, logprobs=params.logprobs or 0)


class ChatBody(ChoicesBody, AnyChatBody, ReasoningFields):
    refused: ClassVar[Mapping[str, str]] = {
        **GenerationBody.refused,
        "audio": ": the output is text",
        "chat_template": ": the model's own is used",
        "documents": "",
        "function_call": "; use tool_choice",
        "functions": "; use tools",
        "web_search_options": ": this server does not search",
    }

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    # The default is auto if there are tools.
    tool_choice: AnyChoice | None = None
    parallel_tool_calls: bool | None = None
    # vLLM's fields: the answer continues the last message; and it has the text of that message, too.
    continue_final_message: bool | None = None
    echo: bool | None = None
    modalities: list[Literal["text"]] | None = None
    # Accepted without effect.
    verbosity: str | None = None

    @property
    def names(self) -> Mapping[str, str]:
        newer = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        return {"prompt": "messages", "logprobs": "top_logprobs"} | newer

    @property
    def num_kept_logprobs(self) -> int | None:
        return None if self.stream else self.num_logprobs

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    def conversation(self) -> Conversation:
        """Returns the chat in the form of all APIs. Raises InvalidRequest."""
        tools, choice = offered(self.tools, self.tool_choice)
        one_at_most = self.parallel_tool_calls is False
        is_continued = is_continued_by(self.continue_final_message, self.add_generation_prompt, self.messages)
        return Conversation(self.messages, tools, choice, one_at_most, self.effort, is_continued)

    @property
    def shows_reasoning(self) -> bool:
        return super().shows_reasoning and not (self.reasoning and self.reasoning.exclude)

    def sampling_params(self) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest(f"top_logprobs={self.top_logprobs}: only allowed with logprobs=true")
        newer = self.max_completion_tokens
        return self._choices_params(self.max_tokens if newer is None else newer, self.num_logprobs)
