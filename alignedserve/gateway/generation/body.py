"""The fields that all APIs of generated text have in common. Ranges are checked by SamplingParams, so that they are the
same for every way into the system."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

from pydantic import Field

from alignedserve.gateway.fields import Fields
from alignedserve.gateway.generation.service import ServiceTier, Slo
from alignedserve.sampling_params import SamplingParams
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.types import InvalidRequest

# The most characters of `cache_salt`: more than any digest or key has.
MAX_SALT_CHARS = 256
# Only the first error is reported, and making errors of all wrong items would take time.
FIRST_ERROR: Any = Field(fail_fast=True)
_STRUCTURED = "; use structured_outputs"


class StructuredOutputs(Fields):
    """vLLM's. See StructuredOutputsParams."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], FIRST_ERROR] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationBody(Fields):
    refused: ClassVar[Mapping[str, str]] = {
        "allowed_token_ids": "",
        "bad_words": "",
        "guided_choice": _STRUCTURED,
        "guided_grammar": _STRUCTURED,
        "guided_json": _STRUCTURED,
        "guided_regex": _STRUCTURED,
        "ebnf": _STRUCTURED,
        "json_schema": _STRUCTURED,
        "logits_processors": "",
        "moderation": ": it moderates nothing",
        "regex": _STRUCTURED,
        "truncate_prompt_tokens": "",
        "use_beam_search": "",
    }

    model: str | None = None
    stream: bool | None = None
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
    structured_outputs: StructuredOutputs | None = None
    service_tier: ServiceTier | None = None
    slo: Slo | None = None
    # vLLM's field: KV of earlier prompts is reused only if this is the same.
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None

    @contextmanager
    def naming(self) -> Iterator[None]:
        """An InvalidRequest that is raised in the block names the parameter as the client knows it."""
        try:
            yield
        except InvalidRequest as error:
            name = re.match("[a-z_]*", str(error))
            assert name
            known = self.names.get(name[0], name[0])
            raise InvalidRequest(known + str(error)[name.end() :]) from error

    @property
    def names(self) -> Mapping[str, str]:
        """Maps names of SamplingParams, and of a call, to the ones that the client knows, where they differ."""
        return {}

    @property
    def structure_name(self) -> str:
        """Returns the name of the parameter that prescribes the form of the output."""
        return "structured_outputs"

    @property
    def num_kept_logprobs(self) -> int | None:
        """Returns the number of likeliest tokens whose log-probabilities are kept until the answer is complete; None if
        none are."""
        return None

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequest."""
        raise NotImplementedError

    def params(
        self,
        max_tokens: int | None,
        logprobs: int | None,
        form: StructuredOutputsParams | None = None,
        **more: Any,
    ) -> SamplingParams:
        """Returns the parameters that the fields here ask for, and `more`. `form` is that of the API's own way to
        prescribe the output."""
        given = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        structured = self._structured_outputs(form)
        return SamplingParams(
            **given, **more, max_tokens=max_tokens, logprobs=logprobs, structured_outputs=structured
        )

    def _structured_outputs(self, form: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        wanted = self.structured_outputs
        if wanted is None:
            return form
        if form is not None:
            raise InvalidRequest(f"structured_outputs: not together with {self.form_name}")
        return StructuredOutputsParams(
            json=wanted.json_schema,
            regex=wanted.regex,
            choice=wanted.choice,
            grammar=wanted.grammar,
            json_object=wanted.json_object,
        )

    @property
    def form_name(self) -> str:
        """Returns the name of the API's own parameter for the form of the output."""
        return "response_format"


# SamplingParams has these fields by the same name and meaning.
_SAMPLING = (
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


def _token_id(key: str) -> int:
    # int() accepts more than that: +5, 1_0, other scripts' digits.
    if not re.fullmatch("[0-9]{1,18}", key):
        raise InvalidRequest(f"logit_bias key={key!r}: must be a token id")
    return int(key)
