"""The fields that all APIs of generated text share. SamplingParams checks their ranges, in every API alike."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

from pydantic import Field

from alignedserve.gateway.generation.call import ServiceTier
from alignedserve.gateway.http.fields import BodyFields
from alignedserve.sampling_params import SamplingParams
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.types import InvalidRequest

# Longest `cache_salt`, in characters: more than any digest or key has.
MAX_SALT_CHARS = 256
# Longest `session`, in characters.
MAX_SESSION_CHARS = 256
# Only the first error is reported, and collecting the errors of many wrong items would take time.
FIRST_ERROR: Any = Field(fail_fast=True)
_STRUCTURED = "; use structured_outputs"
_ENDS_ITSELF = ": a model ends its reasoning itself"


class Slo(BodyFields):
    is_ours: ClassVar[bool] = True

    # Milliseconds from the request's arrival until its first token is due.
    ttft_ms: float | None = None
    # Milliseconds from one token until the next is due.
    tbt_ms: float | None = None


class StructuredOutputs(BodyFields):
    """vLLM's field. See StructuredOutputsParams."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], FIRST_ERROR] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None


class GenerationBody(BodyFields):
    # Fields of other servers: vLLM, SGLang, llama.cpp, and user interfaces for them.
    refused: ClassVar[Mapping[str, str]] = {
        "custom_logit_processor": "",
        "dry_multiplier": "",
        "dynatemp_range": "",
        "guided_choice": _STRUCTURED,
        "guided_grammar": _STRUCTURED,
        "guided_json": _STRUCTURED,
        "guided_regex": _STRUCTURED,
        "epsilon_cutoff": "",
        "eta_cutoff": "",
        "grammar": _STRUCTURED,
        "guidance_scale": "",
        "input_embeds": "",
        "input_ids": "; /v1/completions takes token ids as its prompt",
        "length_penalty": "",
        "logits_processors": "",
        "logprob_token_ids": "",
        "lora_path": "; use the adapter's name as model",
        "max_thinking_tokens": _ENDS_ITSELF,
        "mirostat": "",
        "mirostat_mode": "",
        "moderation": ": it moderates nothing",
        "no_repeat_ngram_size": "",
        "no_stop_trim": "; use include_stop_str_in_output",
        "num_beams": "",
        "prompt_embeds": "",
        "repeat_penalty": "; use repetition_penalty",
        "repetition_detection": "",
        "return_hidden_states": "",
        "smoothing_factor": "",
        "stop_regex": "; use stop",
        "tfs": "",
        "tfs_z": "",
        "thinking_budget": _ENDS_ITSELF,
        "thinking_token_budget": _ENDS_ITSELF,
        "token_ids_logprob": "",
        "top_a": "",
        "top_n_sigma": "",
        "typical": "",
        "typical_p": "",
        "use_beam_search": "",
        "vllm_xargs": "",
        "xtc_probability": "",
    }
    neutral: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("guidance_scale", "length_penalty", "num_beams", "repeat_penalty"), 1),
        **dict.fromkeys(("tfs", "tfs_z", "typical", "typical_p"), 1),
        "top_n_sigma": -1,
        "vllm_xargs": {},
    }

    # The name of the API's own parameter for the form of the output.
    form_name: ClassVar[str] = "response_format"

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
    # SGLang's names of three kinds of structured outputs.
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    allowed_token_ids: Annotated[list[int], FIRST_ERROR] | None = None
    bad_words: Annotated[list[str], FIRST_ERROR] | None = None
    truncate_prompt_tokens: int | None = None
    service_tier: ServiceTier | None = None
    slo: Slo | None = None
    # vLLM's field: KV is reused only between prompts with the same salt.
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    # The name of a chat that will continue.
    session: Annotated[str, Field(min_length=1, max_length=MAX_SESSION_CHARS)] | None = None

    @property
    def will_continue(self) -> bool:
        """Whether the client has announced a next turn. Which chat it belongs to is found by its content."""
        return self.session is not None

    @property
    def reports_progress(self) -> bool:
        return False

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Renames the parameter in an InvalidRequest that the block raises to the client's name for it."""
        try:
            yield
        except InvalidRequest as error:
            name = re.match("[a-z_]*", str(error))
            assert name
            known = self.names.get(name[0], name[0])
            raise InvalidRequest(known + str(error)[name.end() :]) from error

    @property
    def names(self) -> Mapping[str, str]:
        """The client's names of parameters, by their names in SamplingParams, where these differ."""
        return {}

    @property
    def structure_name(self) -> str:
        """The name of the parameter that determines the form of the output."""
        if self.structured_outputs is not None:
            return "structured_outputs"
        aliases = (name for name in _ALIASES if getattr(self, name) is not None)
        return next(aliases, self.form_name.partition(".")[0])

    @property
    def num_kept_logprobs(self) -> int | None:
        """The number of top log-probabilities per token that are held until the answer is complete. None: none are
        held."""
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
        """Returns the sampling parameters of these fields and `more`. `form` is the output form from the API's own
        parameter. Raises InvalidRequest."""
        given = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        structured = self._structured_outputs(form)
        return SamplingParams(
            **given, **more, max_tokens=max_tokens, logprobs=logprobs, structured_outputs=structured
        )

    def _structured_outputs(self, form: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        wanted = self.structured_outputs
        aliases = {
            kind: found for name, kind in _ALIASES.items() if (found := getattr(self, name)) is not None
        }
        if (form is not None) + (wanted is not None) + len(aliases) > 1:
            other = "the other parameters of the output's form" if form is None else self.form_name
            raise InvalidRequest(f"{self.structure_name}: not together with {other}")
        if aliases:
            return StructuredOutputsParams(**aliases)
        if wanted is None:
            return form
        return StructuredOutputsParams(
            json=wanted.json_schema,
            regex=wanted.regex,
            choice=wanted.choice,
            grammar=wanted.grammar,
            json_object=wanted.json_object,
            structural_tag=wanted.structural_tag,
        )


# SGLang's names, and the kind of structured output that each is.
_ALIASES = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
# Fields with the same name and meaning in SamplingParams.
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
    "allowed_token_ids",
    "bad_words",
    "truncate_prompt_tokens",
)


def _token_id(key: str) -> int:
    # int() accepts more than that: +5, 1_0, digits of other scripts.
    if not re.fullmatch("[0-9]{1,18}", key):
        raise InvalidRequest(f"logit_bias key={key!r}: must be a token id")
    return int(key)
