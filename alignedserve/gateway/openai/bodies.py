"""The fields that a client may send. Any other field is refused by name: a misspelt parameter must not be ignored.

Ranges are checked by SamplingParams, so that they are the same for every way into the system.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from alignedserve.gateway.openai.formats import ResponseFormat, StructuredOutputs, structure_of_format
from alignedserve.gateway.openai.service import ServiceTier, Slo
from alignedserve.gateway.tools.bodies import Tool, ToolChoice, Tools, structure_of
from alignedserve.sampling_params import SamplingParams
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.types import InvalidRequest

# This is OpenAI's default for completions; chats go on until the model ends them.
COMPLETION_MAX_TOKENS = 16
# The most characters of `cache_salt`: more than any digest or key has.
MAX_SALT_CHARS = 256

# Only the first error is reported, and making errors of all wrong items would take time.
FIRST_ERROR: Any = Field(fail_fast=True)

TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]
# A template gets these from elsewhere; as variables they would replace those.
_NOT_VARIABLES = ("chat_template", "documents", "messages", "self", "tokenize", "tools")


def _checked_prompt(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(given)
    except ValidationError:
        # pydantic would list for each of the types why the prompt is not of it.
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


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], FIRST_ERROR] | None = None
    stop_token_ids: Annotated[list[int], FIRST_ERROR] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    # vLLM's field: log-probabilities of the prompt's tokens, with so many of the likeliest tokens in their places.
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    service_tier: ServiceTier | None = None
    slo: Slo | None = None
    # vLLM's field: KV of earlier prompts is reused only if this is the same.
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    # These fields are accepted, and change nothing.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def structure_name(self) -> str:
        """The name of the parameter that prescribes the form of the output."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    @property
    def called(self) -> dict[str, str]:
        """Maps names of SamplingParams to the ones that the client knows, where they differ."""
        return {}

    @contextmanager
    def naming(self) -> Iterator[None]:
        """An InvalidRequest that is raised in the block names the parameter as the client knows it."""
        try:
            yield
        except InvalidRequest as error:
            name = re.match("[a-z_]*", str(error))
            assert name
            raise InvalidRequest(self.called.get(name[0], name[0]) + str(error)[name.end() :]) from error

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: only allowed with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(f"prompt_logprobs={self.prompt_logprobs}: not available with stream=true")

    @property
    def _num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    def _sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        given = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        return SamplingParams(
            **given,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=self._num_prompt_logprobs,
            structured_outputs=self._structured_outputs(),
        )

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        of_format = structure_of_format(self.response_format)
        wanted = self.structured_outputs
        if wanted is None:
            return of_format
        if of_format is not None:
            raise InvalidRequest("structured_outputs: not together with response_format")
        return StructuredOutputsParams(
            json=wanted.json_schema,
            regex=wanted.regex,
            choice=wanted.choice,
            grammar=wanted.grammar,
            json_object=wanted.json_object,
        )


# SamplingParams has these fields by the same name and meaning.
_SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
)


class CompletionBody(_Body):
    prompt: Prompt
    max_tokens: int | None = COMPLETION_MAX_TOKENS
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: None = None

    @property
    def called(self) -> dict[str, str]:
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
        """Whether the client wants the prompt back, maybe with its log-probabilities, and nothing more."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def _num_prompt_logprobs(self) -> int | None:
        """An echoed prompt has log-probabilities like the rest."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((each for each in asked if each is not None), default=None)

    def sampling_params(self) -> SamplingParams:
        """`n` becomes the number of choices that are made, which is `best_of` where that is given."""
        self.check()
        # Every request computes at least one token, even an echo alone.
        params = self._sampling_params(1 if self.is_only_echo else self.max_tokens, self.logprobs)
        if self.best_of is None or self.best_of == params.n:
            return params
        if self.best_of < params.n:
            raise InvalidRequest(f"best_of={self.best_of}: must be at least n={params.n}")
        if self.stream:
            raise InvalidRequest(
                f"best_of={self.best_of}: more than n={params.n} is not possible with stream=true"
            )
        # The best choices are found by their log-probabilities.
        return replace(params, n=self.best_of, logprobs=params.logprobs or 0)


class ChatBody(_Body):
    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    # The default is auto if there are tools.
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def called(self) -> dict[str, str]:
        newer = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        return {"prompt": "messages", "logprobs": "top_logprobs"} | newer

    @property
    def template_variables(self) -> dict[str, Any]:
        return template_variables(self.chat_template_kwargs)

    @property
    def called_tools(self) -> list[Tool]:
        """The tools that may be called."""
        return [] if self.tools is None or self.tool_choice == "none" else self.tools

    @property
    def structure_name(self) -> str:
        is_forced = self.called_tools and self.tool_choice not in (None, "auto")
        return "tools" if is_forced else super().structure_name

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        asked = super()._structured_outputs()
        one_at_most = self.parallel_tool_calls is False
        forced = structure_of(self.called_tools, self.tool_choice or "auto", one_at_most)
        if asked is not None and forced is not None:
            raise InvalidRequest("tool_choice: a call that has to be made leaves no room for another format")
        return asked or forced

    def sampling_params(self) -> SamplingParams:
        self.check()
        if self.tool_choice not in (None, "none") and self.tools is None:
            raise InvalidRequest("tool_choice: there are no tools")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest(f"top_logprobs={self.top_logprobs}: only allowed with logprobs=true")
        newer = self.max_completion_tokens
        max_tokens = self.max_tokens if newer is None else newer
        return self._sampling_params(max_tokens, self.top_logprobs or 0 if self.logprobs else None)


def template_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """Returns a chat template's variables, such as Qwen3's enable_thinking. Raises InvalidRequest."""
    for name in _NOT_VARIABLES:
        if given and name in given:
            raise InvalidRequest(f"chat_template_kwargs: {name} is not a variable of a template")
    return dict(given or {})


def _token_id(key: str) -> int:
    # int() accepts more than that: +5, 1_0, other scripts' digits.
    if not re.fullmatch("[0-9]{1,18}", key):
        raise InvalidRequest(f"logit_bias key={key!r}: must be a token id")
    return int(key)
