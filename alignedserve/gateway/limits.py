"""What a client may ask for at most. Checked before anything is allocated for it. The text is the option's help."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

from alignedserve.prompt_logprobs import check_number
from alignedserve.sampling_params import MAX_LOGPROBS, SamplingParams
from alignedserve.types import InvalidRequest


@dataclass(frozen=True)
class Limits:
    max_body_bytes: Annotated[int, "of a request's body; more: 413"] = 8 << 20
    max_file_bytes: Annotated[int, "of an uploaded file; more: 413"] = 200_000_000
    max_prompt_tokens: Annotated[int | None, "of one prompt [default: what the model has room for]"] = None
    max_choices: Annotated[int, "of one call: its prompts times n (or best_of)"] = 256
    max_logprobs: Annotated[int, "likeliest tokens that may be asked for"] = MAX_LOGPROBS
    max_stop_strings: Annotated[int, "of one call"] = 16
    max_stop_chars: Annotated[int, "of one stop string"] = 256
    max_token_ids: Annotated[int, "in stop_token_ids or logit_bias of one call"] = 1024
    max_grammar_bytes: Annotated[int, "of a JSON schema, regex, choice list or grammar"] = 64 << 10
    grammar_timeout_s: Annotated[float, "longest that a schema, regex or grammar may take to compile"] = 1.0
    max_requests_per_key: Annotated[
        int, "that an API key, or all clients where none is needed, may have open at once; more: 429"
    ] = 4096

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value <= 0:
                raise ValueError(f"{field.name}={value}: must be greater than 0")

    def check(self, num_prompts: int, params: SamplingParams) -> None:
        """Raises InvalidRequest that names the limit."""
        if num_prompts > self.max_choices:
            raise InvalidRequest(f"prompt: {num_prompts} prompts; at most {self.max_choices} are allowed")
        if num_prompts * params.n > self.max_choices:
            raise InvalidRequest(
                f"n={params.n}: of {num_prompts} prompts; this server gives at most {self.max_choices} choices"
            )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self.max_logprobs:
                raise InvalidRequest(f"{name}={count}: must be at most {self.max_logprobs}")
        if len(params.stop_strings) > self.max_stop_strings:
            raise InvalidRequest(
                f"stop: {len(params.stop_strings)} strings; at most {self.max_stop_strings} are allowed"
            )
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            if ids and len(ids) > self.max_token_ids:
                raise InvalidRequest(f"{name}: {len(ids)} tokens; at most {self.max_token_ids} are allowed")
        longest = max(map(len, params.stop_strings), default=0)
        if longest > self.max_stop_chars:
            raise InvalidRequest(
                f"stop: a string of {longest} characters; at most {self.max_stop_chars} are allowed"
            )

    def check_prompt(self, num_tokens: int, params: SamplingParams) -> None:
        check_number(num_tokens, params.prompt_logprobs)
        if self.max_prompt_tokens is not None and num_tokens > self.max_prompt_tokens:
            raise InvalidRequest(f"prompt: {num_tokens} tokens; at most {self.max_prompt_tokens} are allowed")
